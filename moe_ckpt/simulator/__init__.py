"""What a user will get before a run: iteration time, overhead, recovery, memory and ETTR of each system."""
