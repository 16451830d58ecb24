"""The network: a protocol without sockets, and the sockets around it."""
