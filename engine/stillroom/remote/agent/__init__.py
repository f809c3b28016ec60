"""The program that does our work on another machine, one command for each thing we want there."""
