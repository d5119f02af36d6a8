"""For how long silence is borne: all of the time for the first, little for who is asked next."""

from orchestrator.lifecycle.survival.links import Peer
from orchestrator.lifecycle.survival.silence import ANSWER_S, COME_S, Silences

PEERS = {rank: Peer("127.0.0.1", 1, rank // 2) for rank in range(6)}


def test_only_the_first_silence_of_a_generation_has_all_of_the_time():
    one = Silences(PEERS, 5.0)
    for _ in range(2):
        assert (one.word_s(answered=False), one.answer_s(1), one.come_s) == (5.0, 5.0, 5.0)
        one.fell(0)
        assert one.word_s(answered=True) == 5.0, "who is at work is not hurried"
        assert one.word_s(answered=False) == ANSWER_S
        assert one.answer_s(1) == 0.0, "on a node that is silent already"
        assert 0.0 < one.answer_s(2) < 5.0
        assert one.come_s == COME_S + ANSWER_S
        one.over()


def test_nothing_takes_longer_than_the_time_that_there_is():
    one = Silences(PEERS, 0.2)
    one.fell(0)
    assert one.word_s(answered=False) == one.answer_s(2) == one.come_s == 0.2
