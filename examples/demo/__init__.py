"""Ask questions about long documents three times: cold, from kvkeep's memory, from kvkeep's disk."""
