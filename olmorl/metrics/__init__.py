"""What a run says about itself: metrics, where they go, and the books that must close. No torch here."""
