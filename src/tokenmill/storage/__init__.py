"""Files of this machine, object stores and the hub: the only code that writes."""
