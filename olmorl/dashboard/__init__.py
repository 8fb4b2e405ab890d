"""The page that shows a run, while it goes on and after. Reads the run directory alone; the run knows nothing of it."""
