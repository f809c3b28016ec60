"""The process here that has a run done on another machine, and keeps the run's folder true."""
