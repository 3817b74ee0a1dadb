"""What takes records last.

trainer/   samples -> optimizer steps -> weights
"""
