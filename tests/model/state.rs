//! What one state of the model is: the database, its transactions, the clients, and what is left of
//! each budget. Times are relative to the present, so that an endless run of the clock is a loop.

use std::fmt;

use crate::config::{Config, Kind};

/// A lease lasts this many ticks,
pub(crate) const TTL: i8 = 2;
/// counts as live this long after its expiry,
pub(crate) const TOLERANCE: i8 = 1;
/// the server's clock jumps this far,
pub(crate) const JUMP: i8 = 4;
/// and a statement that has read the clock is ended by `statement_timeout` after this long.
const STATEMENT_LIMIT: u8 = 4;

/// Transactions at a time.
pub(crate) const SLOTS: usize = 6;
pub(crate) const CLIENTS: usize = 3;
/// Lock ids per client.
pub(crate) const IDS: u8 = 5;

/// The liveness rule of the crate itself.
pub(crate) fn live(expires: i8, now: i8) -> bool {
    syncguard::is_live(i64::from(expires), i64::from(now), i64::from(TOLERANCE))
}

/// The key's row; `id` 0 where there is none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Row {
    pub(crate) id: u8,
    pub(crate) expires: i8,
    pub(crate) fence: u8,
    /// Committed by a message whose client had given it up.
    pub(crate) unheard: bool,
}

impl Row {
    pub(crate) fn live_now(self) -> bool {
        self.id != 0 && live(self.expires, 0)
    }
}

/// What is committed: the row, the counter (0: none), and a register that fenced work writes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Database {
    pub(crate) row: Row,
    pub(crate) counter: u8,
    pub(crate) register: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Pc {
    #[default]
    Sent,
    // acquire
    Look,
    Row,
    Counter,
    View,
    RaiseCounter,
    WriteRow,
    // acquire, key without a row
    TryQueue,
    RaiseFirst,
    InsertRow,
    // release, live lease
    DeleteRow,
    // release, extend
    FindRow,
    // the two-message form: first answer given, second message sent
    Between,
    SentAgain,
    // fenced work
    ShareCounter,
    WriteRegister,
    Commit,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Outcome {
    #[default]
    None,
    Locked,
    Grant,
    Confirm,
    /// Nothing is changed; the careful statement decides.
    Nothing,
    Mine,
    Granted,
    Write,
    Released,
    Extended,
    NotHeld,
    Busy,
    Stale,
    Written,
    Refused,
}

/// Who waits for the answer. Nobody: a message that may be late, of a client that gave it up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Ear {
    #[default]
    Nobody,
    Caller,
    Worker,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) enum CounterLock {
    #[default]
    No,
    Share,
    Update,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) enum RowWrite {
    #[default]
    No,
    Put,
    Delete,
}

/// A transaction in the server, or the message that will begin it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[allow(clippy::struct_excessive_bools)] // Locks that are held, or not.
pub(crate) struct Tx {
    pub(crate) kind: Option<Kind>,
    pub(crate) two_messages: bool,
    pub(crate) pc: Pc,
    pub(crate) owner: u8,
    pub(crate) ear: Ear,
    pub(crate) id: u8,
    /// Of fenced work: the writer's fence. Of a grant: the fence that the answer carries.
    pub(crate) fence: u8,
    pub(crate) out: Outcome,
    pub(crate) queue_lock: bool,
    pub(crate) row_lock: bool,
    pub(crate) counter_lock: CounterLock,
    pub(crate) register_lock: bool,
    /// The statement's snapshot of the row, and whether that very row was deleted since.
    pub(crate) seen: Row,
    pub(crate) seen_gone: bool,
    pub(crate) seen_counter: bool,
    /// A live row of somebody else was seen.
    pub(crate) looked: bool,
    /// A clock that was read and is still used: its reading, and 1 + the ticks since.
    pub(crate) now: i8,
    pub(crate) clock_age: u8,
    pub(crate) row_write: RowWrite,
    pub(crate) new_row: Row,
    pub(crate) new_counter: u8,
}

impl Tx {
    pub(crate) fn is_free(&self) -> bool {
        self.kind.is_none()
    }

    /// Reads the clock now, to be used later.
    pub(crate) fn read_clock(&mut self) {
        self.now = 0;
        self.clock_age = 1;
    }

    /// Whether the message under way may commit something.
    pub(crate) fn may_commit(&self) -> bool {
        let reads_only = self.kind == Some(Kind::Read);
        !reads_only
            && (!self.two_messages
                || matches!(self.pc, Pc::SentAgain | Pc::RaiseCounter | Pc::WriteRow | Pc::Commit | Pc::Done))
    }

    /// Ends the transaction: locks and snapshots are gone, the answer stays for whom it is for.
    pub(crate) fn end(&mut self, out: Outcome) {
        let (kind, owner, ear, id, fence) = (self.kind, self.owner, self.ear, self.id, self.fence);
        *self = Self::default();
        if ear != Ear::Nobody {
            *self = Self { kind, owner, ear, id, fence, out, pc: Pc::Done, ..Self::default() };
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) enum Phase {
    #[default]
    Idle,
    Acquiring,
    /// The answer to an acquire is lost.
    Doubt,
    /// Extending before the guard is handed out.
    Freshening,
    Holding,
    /// Holding, and at work.
    Writing,
    Releasing,
    /// The answer to a release is lost.
    ReleaseDoubt,
    Crashed,
}

/// An id that the worker releases until `over`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Deferred {
    pub(crate) id: u8,
    pub(crate) over: i8,
    pub(crate) may_arrive: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    pub(crate) id: u8,
    pub(crate) fence: u8,
    /// How long the lease would be trusted if the acquire under way were granted, or is trusted
    /// until the extend before the hand-out is answered.
    pub(crate) sent: i8,
    /// The same for the extend under way.
    pub(crate) extend_sent: i8,
    /// How long the lease is trusted; 0: not.
    pub(crate) deadline: i8,
    /// An answer to the call under way was lost before.
    pub(crate) doubted: bool,
    pub(crate) deferred: [Deferred; 2],
    pub(crate) acquires: u8,
    pub(crate) extends: u8,
    pub(crate) writes: u8,
}

impl Client {
    /// What `is_held()` of the client's guard says now.
    pub(crate) fn believes(&self) -> bool {
        matches!(self.phase, Phase::Holding | Phase::Writing) && self.deadline > 0
    }

    /// Whether the client, or its worker, looks after this id.
    pub(crate) fn tracks(&self, id: u8) -> bool {
        let own = self.id == id && !matches!(self.phase, Phase::Idle | Phase::Crashed);
        own || self.deferred.iter().any(|deferred| deferred.id == id)
    }

    pub(crate) fn defer(&mut self, id: u8, may_arrive: bool) {
        let slot =
            self.deferred.iter_mut().find(|deferred| deferred.id == 0).expect("more unknown ids than slots");
        *slot = Deferred { id, over: TTL + TOLERANCE, may_arrive };
        self.deferred.sort_unstable();
    }

    pub(crate) fn settle(&mut self, id: u8) {
        for deferred in &mut self.deferred {
            if deferred.id == id {
                *deferred = Deferred::default();
            }
        }
        self.deferred.sort_unstable();
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct State {
    pub(crate) db: Database,
    /// What outlives a crash of the server.
    pub(crate) durable: Database,
    pub(crate) txs: [Tx; SLOTS],
    pub(crate) clients: [Client; CLIENTS],
    /// The fences that clients were told of, as bits.
    pub(crate) told: u16,
    pub(crate) jumped: bool,
    pub(crate) losses: u8,
    pub(crate) jumps: u8,
    pub(crate) client_crashes: u8,
    pub(crate) server_crashes: u8,
}

impl State {
    pub(crate) fn first(config: &Config) -> Self {
        let mut state = Self {
            losses: config.losses,
            jumps: config.jumps,
            client_crashes: config.client_crashes,
            server_crashes: config.server_crashes,
            ..Self::default()
        };
        for client in state.clients.iter_mut().take(config.clients) {
            client.acquires = config.acquires;
            client.extends = config.extends;
            client.writes = config.writes;
        }
        for client in state.clients.iter_mut().skip(config.clients) {
            client.phase = Phase::Crashed;
        }
        state
    }

    pub(crate) fn others(&self, tx: usize) -> impl Iterator<Item = &Tx> {
        self.txs.iter().enumerate().filter(move |(at, _)| *at != tx).map(|(_, tx)| tx)
    }
    /// Real time goes on by one tick, for the server's clock and everybody else's.
    pub(crate) fn tick(&self) -> Option<Self> {
        if self.txs.iter().any(|tx| tx.clock_age > STATEMENT_LIMIT) {
            return None;
        }
        let mut next = *self;
        next.shift(-1);
        for tx in &mut next.txs {
            if tx.clock_age > 0 {
                tx.clock_age += 1;
            }
        }
        for client in &mut next.clients {
            for time in [&mut client.sent, &mut client.extend_sent, &mut client.deadline] {
                *time = (*time - 1).max(0);
            }
            for deferred in &mut client.deferred {
                deferred.over = (deferred.over - 1).max(0);
            }
        }
        Some(next)
    }

    /// The server's clock moves: what it was compared with moves the other way.
    pub(crate) fn shift(&mut self, by: i8) {
        for row in [&mut self.db.row, &mut self.durable.row] {
            row.expires += by;
        }
        for tx in &mut self.txs {
            for row in [&mut tx.seen, &mut tx.new_row] {
                row.expires += by;
            }
            if tx.clock_age > 0 {
                tx.now += by;
            }
        }
    }

    /// Makes equal what no step can tell apart.
    pub(crate) fn tidy(&mut self, config: &Config) {
        for tx in &mut self.txs {
            // What was seen is used up by the decision, and of the row only the fence check (and a
            // mutation) needs more than its id.
            match tx.pc {
                Pc::Look
                | Pc::Row
                | Pc::Counter
                | Pc::View
                | Pc::FindRow
                | Pc::DeleteRow
                | Pc::TryQueue
                | Pc::ShareCounter => {
                    if !matches!(tx.kind, Some(Kind::Fenced | Kind::Absent)) && !config.mutation.no_row_lock {
                        (tx.seen.expires, tx.seen.fence, tx.seen.unheard) = (0, 0, false);
                    }
                }
                _ => {
                    (tx.seen, tx.seen_gone) = (Row::default(), false);
                    (tx.seen_counter, tx.looked) = (false, false);
                }
            }
        }
        let oldest = self.txs.iter().filter(|tx| tx.clock_age > 0).map(|tx| tx.now).min().unwrap_or(0).min(0);
        let jumps = i8::try_from(self.jumps).expect("few jumps");
        // Below this, a row is dead by every clock that may still be compared with it.
        let floor = oldest - TOLERANCE - 1 - JUMP * jumps;
        let cut = |row: &mut Row| {
            if row.id == 0 {
                *row = Row::default();
            }
            row.expires = row.expires.max(if row.id == 0 { 0 } else { floor });
        };
        cut(&mut self.db.row);
        cut(&mut self.durable.row);
        for tx in &mut self.txs {
            cut(&mut tx.seen);
            cut(&mut tx.new_row);
        }
        self.txs.sort_unstable();
    }

    /// The same state with the clients' names changed.
    pub(crate) fn renamed(&self, names: [u8; CLIENTS]) -> Self {
        let id =
            |id: u8| if id == 0 { 0 } else { names[usize::from((id - 1) / IDS)] * IDS + (id - 1) % IDS + 1 };
        let mut next = *self;
        for (at, client) in self.clients.iter().enumerate() {
            let place = &mut next.clients[usize::from(names[at])];
            *place = *client;
            place.id = id(client.id);
            for deferred in &mut place.deferred {
                deferred.id = id(deferred.id);
            }
            place.deferred.sort_unstable();
        }
        for row in [&mut next.db.row, &mut next.durable.row] {
            row.id = id(row.id);
        }
        for tx in next.txs.iter_mut().filter(|tx| !tx.is_free()) {
            tx.owner = names[usize::from(tx.owner)];
            tx.id = id(tx.id);
            tx.seen.id = id(tx.seen.id);
            tx.new_row.id = id(tx.new_row.id);
        }
        next.txs.sort_unstable();
        next
    }
}

/// `A1` is the first lock id of client A.
pub(crate) fn name(id: u8) -> String {
    if id == 0 { "-".into() } else { format!("{}{}", char::from(b'A' + (id - 1) / IDS), (id - 1) % IDS + 1) }
}

pub(crate) fn client_name(client: u8) -> char {
    char::from(b'A' + client)
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.db.row;
        if row.id == 0 {
            write!(f, "row none")?;
        } else {
            write!(f, "row {} fence {} expires in {}", name(row.id), row.fence, row.expires)?;
        }
        write!(f, "; counter {}; register {}", self.db.counter, self.db.register)?;
        for (at, client) in self.clients.iter().enumerate() {
            if client.phase != Phase::Idle && client.phase != Phase::Crashed {
                let at = u8::try_from(at).unwrap_or_default();
                write!(f, "; {} {:?} {}", client_name(at), client.phase, name(client.id))?;
                if client.believes() {
                    write!(f, " HELD for {}", client.deadline)?;
                }
            }
        }
        for tx in self.txs.iter().filter(|tx| !tx.is_free()) {
            write!(f, "; [{:?} {} {:?}", tx.kind.unwrap_or_default(), name(tx.id), tx.pc)?;
            if tx.ear == Ear::Nobody {
                write!(f, ", given up")?;
            }
            write!(f, "]")?;
        }
        Ok(())
    }
}
