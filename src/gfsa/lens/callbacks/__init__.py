"""The lens in other people's training loops; each module needs its own library."""
