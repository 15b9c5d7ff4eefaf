//! What one exploration covers: how much of each action there is, and what of the protocol is
//! taken out to see whether the model notices.

use crate::client::{check, events, is_orphan};
use crate::explore::{Event, Model};
use crate::state::{CLIENTS, State, name};

/// What a transaction does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Kind {
    #[default]
    Acquire,
    /// What an acquire in one message tries first: the grant of a key without a row.
    Absent,
    Release,
    /// What a release in one message tries first: the end of a live lease.
    ReleaseLive,
    Extend,
    Renew,
    /// Work on the register behind the fence check.
    Fenced,
    /// The same without it.
    Unfenced,
    /// A plain read by lock id, as a mutation reads after a lost answer.
    Read,
}

/// What is taken out, one at a time or together.
#[derive(Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools)] // Each is one independent mutation.
pub(crate) struct Mutation {
    pub(crate) no_advisory_lock: bool,
    pub(crate) no_row_lock: bool,
    pub(crate) no_upsert_condition: bool,
    pub(crate) no_all_or_nothing: bool,
    /// Decisions by the clock of the transaction's begin.
    pub(crate) clock_at_begin: bool,
    pub(crate) deadline_from_reply: bool,
    /// A lost answer is followed by an acquire with another id.
    pub(crate) fresh_id: bool,
    /// A lost answer is looked up with a plain read.
    pub(crate) resolve_by_reading: bool,
    /// After an unknown outcome nobody releases the id.
    pub(crate) no_deferred_release: bool,
    /// Grants commit as releases do, without waiting for the disk.
    pub(crate) async_grant: bool,
    /// The work on the register is not fenced.
    pub(crate) unfenced: bool,
    /// Extends and renewals do not compare the fence.
    pub(crate) no_fence: bool,
    /// `FOR KEY SHARE` instead of `FOR SHARE`.
    pub(crate) key_share: bool,
    /// The grant of a key without a row overwrites a row that has come since its look.
    pub(crate) absent_overwrites: bool,
    /// The same grant commits the counter without the row.
    pub(crate) absent_burns: bool,
    /// The same grant does not queue.
    pub(crate) absent_unqueued: bool,
    /// The end of a live lease is judged when it is found, and not again after the wait.
    pub(crate) judged_once: bool,
    /// The end of a live lease is told as such when it changed nothing.
    pub(crate) released_blindly: bool,
}

#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Config {
    pub(crate) clients: usize,
    /// Per client.
    pub(crate) acquires: u8,
    pub(crate) extends: u8,
    pub(crate) writes: u8,
    /// In all.
    pub(crate) losses: u8,
    pub(crate) jumps: u8,
    pub(crate) client_crashes: u8,
    pub(crate) server_crashes: u8,
    /// Which of the forms are used: in one message, in two.
    pub(crate) one_message: bool,
    pub(crate) two_messages: bool,
    /// Statements that wait may run into `lock_timeout`.
    pub(crate) timeouts: bool,
    /// Late messages are no excuse for a lease that nobody looks after.
    pub(crate) no_orphans: bool,
    /// States that differ only in the clients' names are one.
    pub(crate) symmetry: bool,
    /// Every part of every statement is a step of its own.
    pub(crate) fine: bool,
    pub(crate) mutation: Mutation,
}

impl Config {
    pub(crate) const fn new(clients: usize, acquires: u8) -> Self {
        Self {
            clients,
            acquires,
            extends: 0,
            writes: 0,
            losses: 0,
            jumps: 0,
            client_crashes: 0,
            server_crashes: 0,
            one_message: true,
            two_messages: true,
            timeouts: true,
            no_orphans: false,
            symmetry: true,
            fine: false,
            mutation: Mutation {
                no_advisory_lock: false,
                no_row_lock: false,
                no_upsert_condition: false,
                no_all_or_nothing: false,
                clock_at_begin: false,
                deadline_from_reply: false,
                fresh_id: false,
                resolve_by_reading: false,
                no_deferred_release: false,
                async_grant: false,
                unfenced: false,
                key_share: false,
                no_fence: false,
                absent_overwrites: false,
                absent_burns: false,
                absent_unqueued: false,
                judged_once: false,
                released_blindly: false,
            },
        }
    }

    /// The forms in use, by whether they take two messages.
    pub(crate) fn forms(&self) -> impl Iterator<Item = bool> {
        [(false, self.one_message), (true, self.two_messages)]
            .into_iter()
            .filter(|form| form.1)
            .map(|form| form.0)
    }
}

const NAMES: [[u8; CLIENTS]; 6] = [[0, 1, 2], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

impl Model for Config {
    type State = State;

    fn first(&self) -> State {
        State::first(self)
    }

    fn events(&self, state: &State, out: &mut Vec<Event<State>>) {
        events(self, state, out);
    }

    fn check(&self, state: &State) -> Option<&'static str> {
        check(self, state)
    }

    fn representative(&self, mut state: State) -> State {
        state.tidy(self);
        if !self.symmetry {
            return state;
        }
        let names = if self.clients == 2 { &NAMES[1..2] } else { &NAMES[1..] };
        names.iter().map(|names| state.renamed(*names)).fold(state, Ord::min)
    }

    fn is_orphaned(&self, state: &State) -> bool {
        is_orphan(state) && !state.jumped
    }

    fn named(&self) -> Self {
        Self { symmetry: false, ..*self }
    }

    fn id(&self, id: u8) -> String {
        name(id)
    }

    fn describe(&self, state: &State) -> String {
        state.to_string()
    }
}
