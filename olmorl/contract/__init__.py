"""What crosses a process boundary. A leaf: standard library and numpy alone."""
