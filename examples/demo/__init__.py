"""Ask questions about long documents three times: cold, from memory, from disk."""
