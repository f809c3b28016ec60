"""What a run on another machine is sent: the files that it reads, and what they stand for."""
