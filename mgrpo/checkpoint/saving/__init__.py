"""When a state is saved, how it leaves the device, and where its copies lie."""
