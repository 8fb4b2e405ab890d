"""What a run would do on hardware that is not here: a discrete-event simulation over the engine's own scheduler and the
run's own buffer, in virtual time, and a planner that tries splits of the devices with it. No torch, no Ray."""
