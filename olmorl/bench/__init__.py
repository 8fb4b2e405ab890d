"""What the parts of the system do on this machine, measured: the commands behind `olmorl bench`."""
