"""The pool: slots cut from one shared allocation, held by leases."""
