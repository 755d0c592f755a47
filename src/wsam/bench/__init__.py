"""What a step costs on this machine: time, memory and traffic, beside the floor and beside peers.

A two-pass step cannot cost less than two forward-backward passes; these are the floor, and every
case is told as a ratio to it, measured in one interleaved run.
"""
