"""The quickstart task: chain sums with shown work, its tokenizer, and the weak policy that a run begins with.

Everything is made here and nothing is downloaded: `python -m olmorl.quickstart` writes the model folder and the data
that `configs/quickstart.toml` names.
"""
