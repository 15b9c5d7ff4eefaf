//! The rules hold, and each of them is caught when it is taken out.

use super::{BLOCKED, CLIENTS, Config, Cut, DELAYED, ORPHAN, OUTLIVES, PASSED, STANDSTILL};
use crate::{holds, is_caught};

const KEEP: Cut = Cut {
    no_yield: false,
    first_passes: false,
    since_now: false,
    own_calculated: false,
    no_ties: false,
    no_priority: false,
    no_end: false,
    no_bound: false,
    grant_keeps: false,
    leaver_keeps: false,
    no_next: false,
    leaver_first: false,
    asks_anew: false,
    keeps_since: false,
    all_yield: false,
};
/// Three processes.
const APART: Config = Config {
    cut: KEEP,
    until: 5,
    processes: [0, 1, 2],
    priorities: [0; CLIENTS],
    fair: [true; CLIENTS],
    deaths: 0,
    leaves: 0,
    lost: 0,
    jumps: 0,
    latency: 0,
    hostile: false,
    held: false,
};
/// Two clients of one process, and another one.
const TOGETHER: Config = Config { processes: [0, 0, 1], ..APART };

impl Config {
    fn cut(self, cut: Cut) -> Self {
        Self { cut, ..self }
    }
}

#[test]
fn three_processes_and_a_queue_within_one() {
    holds("tickets: three processes", &APART);
    holds("tickets: two in one process", &TOGETHER);
    holds("tickets: two in one process, and the key is held", &Config { held: true, ..TOGETHER });
    holds("tickets: one does not ask", &Config { fair: [true, true, false], ..APART });
    holds("tickets: answers take their time", &Config { latency: 1, until: 4, ..APART });
}

#[test]
fn priorities_come_before_ages() {
    holds("tickets: priorities", &Config { priorities: [0, 1, 0], ..APART });
    holds("tickets: priorities in one process", &Config { priorities: [0, 1, 0], ..TOGETHER });
}

#[test]
fn nobody_stands_in_the_way_by_going() {
    holds("tickets: a process dies", &Config { deaths: 1, ..APART });
    holds("tickets: a process of two dies", &Config { deaths: 1, ..TOGETHER });
    holds("tickets: one gives up", &Config { leaves: 1, ..APART });
    holds("tickets: one of two gives up", &Config { leaves: 1, held: true, ..TOGETHER });
    holds("tickets: a ticket of nobody's", &Config { hostile: true, ..APART });
}

#[test]
fn a_lost_answer_and_a_clock_set_back() {
    holds("tickets: a lost answer", &Config { lost: 1, ..APART });
    holds("tickets: a lost answer in one process", &Config { lost: 1, ..TOGETHER });
    holds("tickets: the clock is set back", &Config { jumps: 1, deaths: 1, until: 4, ..APART });
}

#[test]
fn nobody_is_passed() {
    for (name, config, cut) in [
        ("nobody yields", APART, Cut { no_yield: true, ..KEEP }),
        ("a first attempt passes", APART, Cut { first_passes: true, ..KEEP }),
        ("as old as its row", TOGETHER, Cut { since_now: true, ..KEEP }),
        (
            "priorities do not count",
            Config { priorities: [0, 1, 0], ..APART },
            Cut { no_priority: true, ..KEEP },
        ),
        ("the next one is not put in line", TOGETHER, Cut { no_next: true, ..KEEP }),
        (
            "taken back too soon",
            Config { leaves: 1, held: true, ..TOGETHER },
            Cut { leaver_first: true, ..KEEP },
        ),
        ("the age is kept", Config { jumps: 1, ..APART }, Cut { keeps_since: true, ..KEEP }),
    ] {
        is_caught(&format!("tickets: {name}"), &config.cut(cut), PASSED);
    }
}

#[test]
fn nobody_waits_for_nobody() {
    let slow = Config { latency: 1, ..APART };
    for (name, config, cut, what) in [
        ("calculated anew", slow, Cut { own_calculated: true, ..KEEP }, STANDSTILL),
        ("no ties", APART, Cut { no_ties: true, ..KEEP }, STANDSTILL),
        ("no end", Config { deaths: 1, ..APART }, Cut { no_end: true, ..KEEP }, BLOCKED),
        ("no bound", Config { hostile: true, ..APART }, Cut { no_bound: true, ..KEEP }, BLOCKED),
        (
            "all yield",
            Config { fair: [true, true, false], ..APART },
            Cut { all_yield: true, ..KEEP },
            DELAYED,
        ),
        ("a grant keeps its ticket", APART, Cut { grant_keeps: true, ..KEEP }, OUTLIVES),
        (
            "who gives up keeps it",
            Config { leaves: 1, ..APART },
            Cut { leaver_keeps: true, ..KEEP },
            OUTLIVES,
        ),
        (
            "yields after a lost answer",
            Config { lost: 1, until: 3, ..APART },
            Cut { asks_anew: true, ..KEEP },
            ORPHAN,
        ),
    ] {
        is_caught(&format!("tickets: {name}"), &config.cut(cut), what);
    }
}
