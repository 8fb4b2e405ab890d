"""Every knob. A leaf: pydantic alone, no torch, no Ray."""
