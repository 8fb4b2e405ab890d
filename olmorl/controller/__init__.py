"""The driver: what happens when. It moves references, token arrays and small messages, and never imports torch."""
