"""The part of the host: copies to a device, and preparation and checks of steps."""
