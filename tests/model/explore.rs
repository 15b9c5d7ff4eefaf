//! Breadth first through every state that can be reached, and the way to the first one that is wrong.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};

/// What can be explored: where it starts, what can happen in a state, and what must hold there.
pub(crate) trait Model {
    type State: Clone + Eq + Hash;

    fn first(&self) -> Self::State;

    /// Everything that can happen next.
    fn events(&self, state: &Self::State, out: &mut Vec<Event<Self::State>>);

    fn check(&self, state: &Self::State) -> Option<&'static str>;

    /// The one state that stands for all that differ from it in nothing that matters.
    fn representative(&self, state: Self::State) -> Self::State;

    /// Whether the state has a live lease that a late message left and nobody looks after.
    fn is_orphaned(&self, _: &Self::State) -> bool {
        false
    }

    /// The same without merging what differs in names alone, so that a trace keeps them.
    fn named(&self) -> Self;

    fn id(&self, id: u8) -> String {
        id.to_string()
    }

    fn describe(&self, state: &Self::State) -> String;
}

/// A step: who takes it (a client, or nobody), with which lock id, what it is, where it leads, and
/// what it broke.
pub(crate) struct Event<S> {
    pub(crate) client: Option<u8>,
    pub(crate) id: u8,
    pub(crate) label: Cow<'static, str>,
    pub(crate) state: S,
    pub(crate) fault: Option<&'static str>,
}

/// What an exploration found.
pub(crate) struct Report {
    pub(crate) states: usize,
    pub(crate) transitions: u64,
    /// States that are orphaned.
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
struct Seen<S> {
    states: Vec<S>,
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

impl<S: Eq + Hash> Seen<S> {
    fn new() -> Self {
        Self { states: Vec::new(), parents: Vec::new(), table: vec![EMPTY; 1 << 16] }
    }

    fn add(&mut self, state: S, parent: u32) -> bool {
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
    fn place(&self, state: &S) -> usize {
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

pub(crate) fn explore<M: Model>(model: &M) -> Report {
    let mut seen = Seen::new();
    seen.add(model.representative(model.first()), EMPTY);
    let mut report = Report { states: 0, transitions: 0, orphaned: 0, depth: 0, violation: None };
    let mut found = Vec::new();
    let (mut at, mut level_end) = (0, 1);
    while at < seen.states.len() {
        if at == level_end {
            report.depth += 1;
            level_end = seen.states.len();
        }
        let state = seen.states[at].clone();
        let parent = u32::try_from(at).expect("fewer than 2^32 states");
        model.events(&state, &mut found);
        for event in found.drain(..) {
            report.transitions += 1;
            if let Some(what) = event.fault.or_else(|| model.check(&event.state)) {
                let trace = trace(model, &seen, at, &event, what);
                report.states = seen.states.len();
                report.violation = Some(Violation { what, trace });
                return report;
            }
            let next = model.representative(event.state);
            let orphaned = model.is_orphaned(&next);
            if seen.add(next, parent) {
                report.orphaned += usize::from(orphaned);
            }
        }
        at += 1;
    }
    report.states = seen.states.len();
    report
}

/// The way from the start to a state, and the last step.
fn trace<M: Model>(
    model: &M,
    seen: &Seen<M::State>,
    mut at: usize,
    last: &Event<M::State>,
    what: &str,
) -> String {
    let mut path = vec![at];
    while seen.parents[at] != EMPTY {
        at = seen.parents[at] as usize;
        path.push(at);
    }
    path.reverse();
    let mut text = String::new();
    let mut found = Vec::new();
    for pair in path.windows(2) {
        model.events(&seen.states[pair[0]], &mut found);
        if let Some(event) =
            found.drain(..).find(|event| model.representative(event.state.clone()) == seen.states[pair[1]])
        {
            line(model, &mut text, &event);
        }
        found.clear();
    }
    line(model, &mut text, last);
    let _ = writeln!(text, "  => {what}");
    text
}

fn line<M: Model>(model: &M, text: &mut String, event: &Event<M::State>) {
    let mut who = event.client.map_or(String::new(), |client| char::from(b'A' + client).to_string());
    if event.id != 0 {
        let _ = write!(who, " ({})", model.id(event.id));
    }
    let _ = writeln!(text, "  {who:8} {}\n             {}", event.label, model.describe(&event.state));
}
