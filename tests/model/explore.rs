//! Breadth first through every state that can be reached, and the way to the first one that is wrong.

use std::fmt::Write as _;
use std::hash::{Hash, Hasher};

use crate::client::{Event, check, events, is_orphan};
use crate::config::Config;
use crate::state::{CLIENTS, State, client_name, name};

/// What an exploration found.
pub(crate) struct Report {
    pub(crate) states: usize,
    pub(crate) transitions: u64,
    /// States with a live lease that a late message left and nobody looks after.
    pub(crate) orphaned: usize,
    /// The most steps from the start.
    pub(crate) depth: usize,
    pub(crate) violation: Option<Violation>,
}

pub(crate) struct Violation {
    pub(crate) what: &'static str,
    pub(crate) trace: String,
}

/// Every state once, by open addressing into the list of all: a fingerprint alone could make two
/// states one, and a state would be missed.
struct Seen {
    states: Vec<State>,
    parents: Vec<u32>,
    table: Vec<u32>,
}

const EMPTY: u32 = u32::MAX;

/// FNV over machine words; fast even where nothing is optimised.
#[derive(Default)]
struct Words(u64);

impl Hasher for Words {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }
}

impl Seen {
    fn new() -> Self {
        Self { states: Vec::new(), parents: Vec::new(), table: vec![EMPTY; 1 << 16] }
    }

    fn add(&mut self, state: State, parent: u32) -> bool {
        if self.states.len() * 2 > self.table.len() {
            let bigger = self.table.len() * 2;
            self.table = vec![EMPTY; bigger];
            for at in 0..self.states.len() {
                let place = self.place(&self.states[at]);
                self.table[place] = u32::try_from(at).expect("fewer than 2^32 states");
            }
        }
        let place = self.place(&state);
        if self.table[place] != EMPTY {
            return false;
        }
        self.table[place] = u32::try_from(self.states.len()).expect("fewer than 2^32 states");
        self.states.push(state);
        self.parents.push(parent);
        true
    }

    /// Where the state is, or belongs.
    fn place(&self, state: &State) -> usize {
        let mask = self.table.len() - 1;
        let mut hasher = Words::default();
        state.hash(&mut hasher);
        let mut place = usize::try_from(hasher.finish()).unwrap_or_default() & mask;
        while self.table[place] != EMPTY && self.states[self.table[place] as usize] != *state {
            place = (place + 1) & mask;
        }
        place
    }
}

const NAMES: [[u8; CLIENTS]; 6] = [[0, 1, 2], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

/// The one state that stands for all that differ from it in nothing that matters.
fn representative(config: &Config, mut state: State) -> State {
    state.tidy(config);
    if !config.symmetry {
        return state;
    }
    let names = if config.clients == 2 { &NAMES[1..2] } else { &NAMES[1..] };
    names.iter().map(|names| state.renamed(*names)).fold(state, Ord::min)
}

pub(crate) fn explore(config: &Config) -> Report {
    let mut seen = Seen::new();
    seen.add(representative(config, State::first(config)), EMPTY);
    let mut report = Report { states: 0, transitions: 0, orphaned: 0, depth: 0, violation: None };
    let mut found = Vec::new();
    let (mut at, mut level_end) = (0, 1);
    while at < seen.states.len() {
        if at == level_end {
            report.depth += 1;
            level_end = seen.states.len();
        }
        let state = seen.states[at];
        let parent = u32::try_from(at).expect("fewer than 2^32 states");
        events(config, &state, &mut found);
        for event in found.drain(..) {
            report.transitions += 1;
            let next = representative(config, event.state);
            let fault = event.fault.or_else(|| check(config, &event.state));
            if let Some(what) = fault {
                let trace = trace(config, &seen, at, &event, what);
                report.states = seen.states.len();
                report.violation = Some(Violation { what, trace });
                return report;
            }
            if seen.add(next, parent) {
                report.orphaned += usize::from(is_orphan(&next) && !next.jumped);
            }
        }
        at += 1;
    }
    report.states = seen.states.len();
    report
}

/// The way from the start to a state, and the last step.
fn trace(config: &Config, seen: &Seen, mut at: usize, last: &Event, what: &str) -> String {
    let mut path = vec![at];
    while seen.parents[at] != EMPTY {
        at = seen.parents[at] as usize;
        path.push(at);
    }
    path.reverse();
    let mut text = String::new();
    let mut found = Vec::new();
    for pair in path.windows(2) {
        events(config, &seen.states[pair[0]], &mut found);
        if let Some(event) =
            found.drain(..).find(|event| representative(config, event.state) == seen.states[pair[1]])
        {
            line(&mut text, &event);
        }
        found.clear();
    }
    line(&mut text, last);
    let _ = writeln!(text, "  => {what}");
    text
}

fn line(text: &mut String, event: &Event) {
    let mut who = event.client.map_or(String::new(), |client| client_name(client).to_string());
    if event.id != 0 {
        let _ = write!(who, " ({})", name(event.id));
    }
    let _ = writeln!(text, "  {who:8} {}\n             {}", event.label, event.state);
}
