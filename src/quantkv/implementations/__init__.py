"""What can serve a call of write or attend, by the names that users type: reference, triton, dense, hopper."""
