"""The engine behind HTTP, in the protocol of OpenAI's API: `olmorl serve`.

The engine steps on a thread of its own; everything here lives on one event loop, which only parses, waits and writes.
"""
