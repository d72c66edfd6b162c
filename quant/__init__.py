"""Making 4-bit drafts: prune, trim the vocabulary, quantise, distil, export, evaluate."""
