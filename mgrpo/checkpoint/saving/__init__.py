"""Schedule of saves, copies from the device, and the places of saved states."""
