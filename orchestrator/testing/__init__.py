"""What a third party's cluster, transport or tracker has to do: suites, to subclass with pytest.

Each is a class of tests that asks for one fixture of yours, and each ends in the real code: ranks
are processes, and what they say is read back from the run's folder. See docs/extending.md.
"""
