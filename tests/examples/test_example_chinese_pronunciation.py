"""examples/chinese_pronunciation reads sentences as g2pM does."""

from __future__ import annotations

import pytest
from example_models import answers, example

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SENTENCES = [
    "然而，他红了20年以后，他竟退出了大家的视线。",
    "长江很长，越长越快。",
    "他长大后当了银行行长。",
    "重庆的重量是多少？",
    "音乐让我快乐。",
    "请把这个还给我，我还要用。",
    "他在行里工作，内行得很。",
    "我觉得还得去一趟。",
    "睡觉前他觉得累。",
    "朝阳区的朝阳很美。",
    "都是为了首都的未来。",
    "好学的人好多。",
    "便宜的东西不一定方便。",
    "他调查了调味品的价格。",
    "中奖的人在中国。",
    "种地要种子。",
    "血流了很多，他说流血不流泪。",
    "差不多是他出差的时候。",
    "我们应该答应他。",
    "数一数有多少数字。",
    "空气里有空位。",
    "少年很少说话。",
    "背着书包背课文。",
    "假期里放了一天假。",
    "看着他着急的样子。",
    "一只小鸟只会唱一首歌。",
    "他把风筝放得很高。",
    "参加考试的人参差不齐。",
    "人参很贵。",
    "曾经有个姓曾的人。",
    "单老师的单子。",
    "解先生解开了问题。",
    "那个任先生没有责任。",
    "弹琴和子弹。",
    "传说和传记。",
    "当时他当真了。",
    "倒水时倒下了。",
    "的确是他的目的。",
    "地上慢慢地长出草。",
    "恶心的恶人可恶。",
    "发现头发白了。",
    "分外高兴地分开。",
    "几乎有几个人。",
    "教书的教师教我们。",
    "结实的果子结果了。",
    "尽管他尽力了。",
    "禁止不禁笑。",
    "卷起试卷。",
    "空中有空。",
    "困难时遇难。",
    "宁可安宁。",
    "abc 123，没有中文！",
    "你好",
    "，。",
    "中",
    "A型血",
]


@pytest.fixture(scope="module")
def model():
    return example("chinese_pronunciation", "g2pM")


def test_every_sentence_is_read_as_by_the_package(model):
    from g2pM import G2pM

    package = G2pM()
    assert len(SENTENCES) >= 50
    wanted = [package(sentence, tone=True, char_split=True) for sentence in SENTENCES]
    assert answers(model, SENTENCES) == wanted


def test_the_sentences_leave_readings_open_and_some_leave_none(model):
    counts = [len(model.encode(sentence)["places"]) for sentence in SENTENCES]
    assert min(counts) == 0
    assert sum(counts) > 100
