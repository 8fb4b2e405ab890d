"""Guesses at the tokens that come next, so that one step can judge several.

Why the result is the same with and without: a token is a function of its logits and of noise that is keyed by seed,
prompt, sample, position and token id (`inference.noise`). A step computes the logits behind each guessed token too,
under the penalties and masks that hold there, and draws from each with the noise of that position. What is drawn at the
first position is what the plain loop draws. If it is the guessed token, the logits behind that are those of the plain
loop, and so is what is drawn there; if not, what was drawn behind it is thrown away. No guess changes a token or its
logprob, beyond what the shape of a batch changes anyway.

This is rejection sampling (Leviathan et al. 2023; Chen et al. 2023) for a draft that is certain of its token d, with
one noise for both of its draws. There, d is accepted with min(1, p(d)/q(d)) = p(d), since q(d) = 1, and what takes its
place is drawn from (p - q)+ normalised, which is p without d. Here, a draw from p is d with p(d), and one that is known
not to be d is distributed as p without d.
"""
