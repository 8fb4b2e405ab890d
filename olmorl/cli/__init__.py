"""The commands. They parse, then hand over."""
