"""Handing a finished model on: to the Hub, with a card."""
