"""What several packages above the optimizer share: batches, text, HTML, figures, significance tests."""
