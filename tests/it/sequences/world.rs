//! One history, played on the model and on the server side by side.
//!
//! After every step both must have answered the same: the same variant, the same reason, the same
//! fence, the same error. Times may differ by what went by on the server since the clocks were last
//! set by each other. At the end both must have stored the same.

use std::fmt::Debug;
use std::time::Duration;

use syncguard::backend::{Attempt, ExtendOutcome, Moment, ReleaseOutcome, RenewOutcome, Renewal};
use syncguard::{
    AcquireResult, CLEANUP_GUARD_MS, CancelToken, ErrorCode, Fence, LockBackend, LockError, LockInfoRaw,
    Lookup, LostReason, MemoryBackend, PgLockClient, Reason, Slot, TIME_TOLERANCE_MS,
};

use crate::sequences::server::{MAX_DRIFT_MS, Tables, TooSlow};
use crate::sequences::steps::{CLIENTS, Clients, Form, Id, KEYS, PERMITS, Step, TTLS_MS};

/// Why a history was not played to its end.
pub(crate) enum Stop {
    TooSlow,
    Differ(String),
}

impl From<TooSlow> for Stop {
    fn from(_: TooSlow) -> Self {
        Self::TooSlow
    }
}

/// An answer without its time, and the time.
pub(crate) type Answer<T> = (Result<T, (ErrorCode, bool)>, Option<i64>);

/// What was done to a lease, or why it was not.
#[derive(Debug, PartialEq, Eq)]
enum Outcome<R> {
    Done,
    Refused(Option<R>),
}

/// How the keys and lock ids of a history are called: nobody else has them.
pub(crate) struct Names {
    case: u64,
    pub(crate) keys: Vec<String>,
    generation: [[u32; CLIENTS]; KEYS],
    chosen: Vec<String>,
    stranger: Vec<String>,
    /// The last permit's id of each client.
    permits: [(String, u32); CLIENTS],
    tries: u32,
    /// Whether the dead row of a permit was cleaned up.
    forgotten: bool,
    /// The fence and the slot of each client's last run of each job.
    pub(crate) runs: [[(u64, u64); CLIENTS]; KEYS],
}

impl Names {
    fn new(prefix: &str, case: u64) -> Self {
        let nobody =
            |letter: char| -> Vec<String> { (0..KEYS).map(|key| id(letter, case, key, 0, 0)).collect() };
        Self {
            case,
            keys: (0..KEYS).map(|key| format!("{prefix}-{case}-{key}")).collect(),
            generation: [[0; CLIENTS]; KEYS],
            chosen: nobody('c'),
            stranger: nobody('s'),
            permits: std::array::from_fn(|client| (id('q', case, 0, client, 0), 0)),
            tries: 0,
            forgotten: false,
            runs: [[(1, 0); CLIENTS]; KEYS],
        }
    }

    /// Keys, marks and permits, as they are stored.
    fn stored(&self) -> Vec<String> {
        let marks = self.keys.iter().map(|key| format!("{key}\u{2126}number"));
        let permits = (1..=PERMITS).map(|number| format!("{}\u{2126}{number}", self.keys[0]));
        self.keys.iter().cloned().chain(marks).chain(permits).collect()
    }

    /// A new id for an attempt of this client.
    pub(crate) fn renewed(&mut self, key: usize, client: usize, fresh: bool) -> String {
        self.generation[key][client] += u32::from(fresh);
        self.mine(key, client)
    }

    /// The same for a permit, with the limit of its attempt. It is an id with which PostgreSQL looks at the
    /// permits from the first on, as the model does, whatever the limit is.
    pub(crate) fn permit(&mut self, client: usize, limit: u32, fresh: bool) -> (String, u32) {
        if fresh || self.permits[client].1 == 0 {
            let start = |id: &String| {
                id.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)))
            };
            let first = self.tries + 1;
            let mut ids = (first..).map(|n| (n, id('p', self.case, 0, client, n)));
            let (n, id) = ids.find(|(_, id)| start(id) % 6 == 0).expect("there are many");
            (self.tries, self.permits[client]) = (n, (id, limit));
        }
        self.permits[client].clone()
    }

    pub(crate) fn mine(&self, key: usize, client: usize) -> String {
        id('m', self.case, key, client, self.generation[key][client])
    }

    /// The keys that have a client, and its last id for each.
    pub(crate) fn of_all(&self, clients: &Clients) -> Vec<(usize, String)> {
        let mine = |(key, client): (usize, &Option<usize>)| client.map(|it| (key, self.mine(key, it)));
        clients.iter().enumerate().filter_map(mine).collect()
    }

    fn id(&self, of: Id) -> String {
        match of {
            Id::Mine { key, client } => self.mine(key, client),
            Id::Permit { client } => self.permits[client].0.clone(),
            Id::Chosen { key } => self.chosen[key].clone(),
            Id::Stranger { key } => self.stranger[key].clone(),
        }
    }
}

fn id(letter: char, case: u64, key: usize, client: usize, generation: u32) -> String {
    format!("{letter}{case:011x}{key:03}{client:03}{generation:04}")
}

pub(crate) struct World<'a> {
    pub(crate) client: &'a PgLockClient,
    pub(crate) tables: &'a mut Tables,
    pub(crate) model: MemoryBackend,
    pub(crate) names: Names,
    /// Every call in this form, instead of the one that was drawn for it.
    form: Option<Form>,
}

impl<'a> World<'a> {
    pub(crate) fn new(client: &'a PgLockClient, tables: &'a mut Tables, prefix: &str, case: u64) -> Self {
        let (model, names) = (MemoryBackend::manual(), Names::new(prefix, case));
        tables.begin(&names.stored(), model.server_time());
        Self { client, tables, model, names, form: None }
    }

    pub(crate) fn in_form(mut self, form: Option<Form>) -> Self {
        self.form = form;
        self
    }

    /// Plays the history, and looks at what is left.
    pub(crate) fn play(mut self, history: &[Step]) -> Result<(), Stop> {
        for (place, step) in history.iter().enumerate() {
            if let Err(stop) = self.step(*step) {
                // A decision that was taken too late proves nothing, so that is looked at first.
                self.tables.dump(self.model.server_time())?;
                return Err(match stop {
                    Stop::Differ(how) => Stop::Differ(format!("step {place}, {step:?}: {how}")),
                    Stop::TooSlow => Stop::TooSlow,
                });
            }
        }
        self.compare_stored()
    }

    fn step(&mut self, step: Step) -> Result<(), Stop> {
        match step {
            Step::Acquire { key, ttl, form } => self.acquire(key, ttl, form),
            Step::Attempt { key, client, ttl, form } => {
                let lock_id = self.names.renewed(key, client, true);
                self.attempt(key, &lock_id, ttl, form)
            }
            Step::Again { key, client, ttl, form } => {
                let lock_id = self.names.mine(key, client);
                self.attempt(key, &lock_id, ttl, form)
            }
            Step::Stray { key, other, client, form } => {
                let lock_id = self.names.mine(other, client);
                self.attempt(key, &lock_id, 2, form)
            }
            Step::Release { id, form } => {
                let (lock_id, token) = (self.names.id(id), self.token(form));
                self.both("release", |backend| released(backend.release(&lock_id, &token)))
            }
            Step::ReleaseBy { id } => {
                let lock_id = self.names.id(id);
                self.both("release", |backend| released(backend.release_by(&lock_id, Moment::NEVER)))
            }
            Step::Extend { id, ttl, form } => {
                let (lock_id, token) = (self.names.id(id), self.token(form));
                self.both("extend", |backend| extended(backend.extend(&lock_id, length(ttl), &token)))
            }
            Step::IsLocked { key, form } => {
                let (key, token) = (self.names.keys[key].clone(), self.token(form));
                self.both("is_locked", |backend| {
                    (backend.is_locked(&key, &token).map_err(|error| code(&error)), None)
                })
            }
            Step::Holder { key, form } => {
                let (key, token) = (self.names.keys[key].clone(), self.token(form));
                self.both("holder", |backend| {
                    let seen = backend.holder(&key, Moment::NEVER, &token);
                    (seen.map(|holder| holder.is_some()).map_err(|error| code(&error)), None)
                })
            }
            Step::LookupKey { key, form } => {
                let key = self.names.keys[key].clone();
                self.lookup(Lookup::Key(&key), form)
            }
            Step::LookupId { id, form } => {
                let lock_id = self.names.id(id);
                self.lookup(Lookup::LockId(&lock_id), form)
            }
            Step::Renew { clients, ttl } => self.renew(clients, ttl),
            Step::Kind(kind) => self.kind(kind),
            other => self.meddle(other),
        }
    }

    /// What happens behind the clients' backs.
    fn meddle(&mut self, step: Step) -> Result<(), Stop> {
        match step {
            // What the model has kept of a permit that was cleaned up would live again.
            Step::Pass { seconds } if seconds < 0 && self.names.forgotten => Ok(()),
            Step::Pass { seconds } => {
                let from_ms = self.model.server_time();
                self.model.shift_server_clock(seconds * 1000);
                self.tables.pass(from_ms, self.model.server_time())?;
                Ok(())
            }
            Step::Age { key, past_ms } => {
                let key = &self.names.keys[key];
                let aged = self.model.age(key, past_ms).unwrap();
                same("age", &aged, &self.tables.age(key, self.model.server_time() - past_ms))
            }
            Step::Remove { key } => {
                let key = &self.names.keys[key];
                same("remove", &self.model.remove(key).unwrap(), &self.tables.remove(key))
            }
            Step::Counter { key, value } => {
                let key = &self.names.keys[key];
                self.model.set_counter(key, value).unwrap();
                self.tables.set_counter(key, value);
                Ok(())
            }
            Step::Break { key } => self.break_lock(key),
            Step::CleanUp => self.clean_up(),
            Step::TakeOver { key } => {
                let name = &self.names.keys[key];
                // A counter at its limit lets nobody in.
                let Ok(grant) = self.model.take_over(name) else { return Ok(()) };
                // Half a second off a whole one, as every lease is here.
                self.model.age(name, -300_500).unwrap();
                let now = self.model.server_time();
                let times = (now + 300_500, now + 500);
                self.tables.write(name, &grant.lock_id, times, grant.fence.get());
                self.names.stranger[key] = grant.lock_id;
                Ok(())
            }
            _ => unreachable!("a client's step"),
        }
    }

    /// Takes the key away and raises its counter; at its limit, neither.
    fn break_lock(&mut self, key: usize) -> Result<(), Stop> {
        let key = &self.names.keys[key];
        let expected = match Fence::following(self.model.counter(key).unwrap_or(0)) {
            Ok(fence) => {
                let was = self.model.remove(key).unwrap();
                self.model.set_counter(key, fence.get()).unwrap();
                Ok((was, fence.get()))
            }
            Err(error) => Err(code(&error)),
        };
        let broken = self.client.operator().break_lock(key, "a history");
        let found = broken.map(|broken| (broken.was.is_some(), broken.fence.get()));
        same("break_lock", &expected, &found.map_err(|error| code(&error)))
    }

    /// What would be over also with twice the tolerance goes; the counters stay.
    fn clean_up(&mut self) -> Result<(), Stop> {
        let twice = CLEANUP_GUARD_MS - TIME_TOLERANCE_MS;
        self.model.shift_server_clock(-twice);
        for key in &self.names.keys {
            if self.model.lookup_raw(Lookup::Key(key), &CancelToken::never()).unwrap().is_none() {
                self.model.remove(key).unwrap();
            }
        }
        self.model.shift_server_clock(twice);
        // The model keeps a permit's dead row: nobody asks for that id again.
        for client in 0..CLIENTS {
            let lease = Lookup::LockId(&self.names.permits[client].0);
            if self.model.lookup_raw(lease, &CancelToken::never()).unwrap().is_none() {
                self.names.forgotten |= self.names.permits[client].1 > 0;
                self.names.permits[client] = (id('q', self.names.case, 0, client, 0), 0);
            }
        }
        // How many are deleted says nothing: rows of other histories are among them.
        let cleaned = self.client.operator().cleanup_expired(10_000);
        same("cleanup", &Ok(()), &cleaned.map(drop).map_err(|error| code(&error)))
    }

    /// The server chooses the id; the model is told which.
    fn acquire(&mut self, key: usize, ttl: usize, form: Form) -> Result<(), Stop> {
        let (name, token) = (self.names.keys[key].clone(), self.token(form));
        let answer = LockBackend::acquire(self.client, &name, length(ttl), &token);
        if let Ok(AcquireResult::Acquired(grant)) = &answer {
            self.names.chosen[key].clone_from(&grant.lock_id);
        }
        // Without a grant the model gets an id that nothing carries: an old one could be let in again.
        let lock_id = match &answer {
            Ok(AcquireResult::Acquired(_)) => self.names.chosen[key].clone(),
            _ => id('n', self.names.case, key, 0, 0),
        };
        let attempt = Attempt::new(&name, &lock_id, length(ttl), Moment::NEVER);
        let expected = self.model.attempt(&attempt, &token);
        self.same("acquire", &acquired(expected), &acquired(answer))
    }

    fn attempt(&mut self, key: usize, lock_id: &str, ttl: usize, form: Form) -> Result<(), Stop> {
        let (key, token) = (self.names.keys[key].clone(), self.token(form));
        let attempt = Attempt::new(&key, lock_id, length(ttl), Moment::NEVER);
        self.both("attempt", |backend| acquired(backend.attempt(&attempt, &token)))
    }

    fn lookup(&mut self, what: Lookup<'_>, form: Form) -> Result<(), Stop> {
        let token = self.token(form);
        let (expected, found) = (self.model.lookup_raw(what, &token), self.client.lookup_raw(what, &token));
        let acquired_at = |info: &Result<Option<LockInfoRaw>, LockError>| {
            info.as_ref().ok().and_then(Option::as_ref).map(|info| info.acquired_at_ms)
        };
        let began = (acquired_at(&expected), acquired_at(&found));
        self.same("lookup", &looked_up(expected), &looked_up(found))?;
        match (began.0, began.1.map(|time| self.tables.in_model(time))) {
            // A lease that was aged keeps its length, to which an extend has added a drift.
            (Some(model), Some(server)) => {
                same("lookup, acquired_at_ms", &true, &((server - model).abs() <= MAX_DRIFT_MS))
            }
            (model, server) => same("lookup, acquired_at_ms", &model, &server),
        }
    }

    fn renew(&mut self, clients: Clients, ttl: usize) -> Result<(), Stop> {
        let ids = self.names.of_all(&clients);
        let leases: Vec<_> = ids
            .iter()
            .map(|(key, lock_id)| {
                // The fence of whatever has the id now; of what has none, any.
                let found = self.model.lookup(Lookup::LockId(lock_id), &CancelToken::never());
                let fence =
                    found.ok().flatten().map_or(syncguard::Fence::new(1).unwrap(), |found| found.fence);
                Renewal::new(&self.names.keys[*key], lock_id, fence, length(ttl))
            })
            .collect();
        let expected = self.model.renew(&leases, Moment::NEVER);
        let found = self.client.renew(&leases, Moment::NEVER);
        same("renew, how many", &expected.len(), &found.len())?;
        for (expected, found) in expected.into_iter().zip(found) {
            self.same("renew", &renewed(expected), &renewed(found))?;
        }
        Ok(())
    }

    pub(crate) fn token(&self, drawn: Form) -> CancelToken {
        match self.form.unwrap_or(drawn) {
            Form::One => CancelToken::never(),
            Form::Two => CancelToken::new(),
        }
    }

    pub(crate) fn both<T: Debug + PartialEq>(
        &self,
        what: &str,
        call: impl Fn(&dyn LockBackend) -> Answer<T>,
    ) -> Result<(), Stop> {
        self.same(what, &call(&self.model), &call(self.client))
    }

    /// The server's answer must be the model's, at a time that is at most a drift later.
    pub(crate) fn same<T: Debug + PartialEq>(
        &self,
        what: &str,
        model: &Answer<T>,
        server: &Answer<T>,
    ) -> Result<(), Stop> {
        same(what, &model.0, &server.0)?;
        match (model.1, server.1.map(|time| self.tables.in_model(time))) {
            (Some(model), Some(server)) => close(what, model, server),
            (model, server) => same(what, &model, &server),
        }
    }

    /// What is stored, dead rows included: they are brought back to life in the model to be seen.
    fn compare_stored(self) -> Result<(), Stop> {
        let stored = self.tables.dump(self.model.server_time())?;
        for (key, mark) in self.names.keys.iter().zip(&stored[KEYS..]) {
            let expected = self.model.mark(key, Slot::number(0)).unwrap();
            same("stored mark", &expected.map(u64::cast_signed), &mark.counter)?;
        }
        for (key, stored) in self.names.keys.iter().zip(stored) {
            let counter = self.model.counter(key).map(|counter| i64::try_from(counter).unwrap());
            same("stored counter", &counter, &stored.counter)?;
            same("stored row", &self.model.has_row(key), &stored.row.is_some())?;
            let Some(row) = stored.row else { continue };
            let live = self.model.lookup_raw(Lookup::Key(key), &CancelToken::never()).unwrap();
            if let Some(live) = &live {
                close("stored expiry", live.expires_at_ms, row.expires_at_ms)?;
            }
            self.model.age(key, -5_500).unwrap();
            let model = self.model.lookup_raw(Lookup::Key(key), &CancelToken::never()).unwrap().unwrap();
            same("stored id", &model.lock_id, &row.lock_id)?;
            same("stored fence", &model.fence.to_string(), &row.fence)?;
            same("stored user_key", &model.key, &row.user_key)?;
            let length = |expires_at_ms: i64, acquired_at_ms: i64| expires_at_ms - acquired_at_ms;
            let expected = length(model.expires_at_ms, model.acquired_at_ms);
            let off = length(row.expires_at_ms, row.acquired_at_ms) - expected;
            same("stored length of the lease", &true, &(off.abs() <= MAX_DRIFT_MS))?;
        }
        Ok(())
    }
}

pub(crate) fn same<T: Debug + PartialEq>(what: &str, model: &T, server: &T) -> Result<(), Stop> {
    if model == server {
        return Ok(());
    }
    Err(Stop::Differ(format!("{what}: the model says {model:?}, PostgreSQL says {server:?}")))
}

pub(crate) fn close(what: &str, model: i64, server: i64) -> Result<(), Stop> {
    if (0..=MAX_DRIFT_MS).contains(&(server - model)) {
        return Ok(());
    }
    Err(Stop::Differ(format!(
        "{what}: the model's time is {model}, PostgreSQL's in the model's time {server}"
    )))
}

pub(crate) fn length(ttl: usize) -> Duration {
    Duration::from_millis(TTLS_MS[ttl].unsigned_abs())
}

pub(crate) fn code(error: &LockError) -> (ErrorCode, bool) {
    (error.code(), error.is_outcome_unknown())
}

fn acquired(answer: Result<AcquireResult, LockError>) -> Answer<Option<(String, u64)>> {
    match answer {
        Ok(AcquireResult::Acquired(grant)) => {
            (Ok(Some((grant.lock_id, grant.fence.get()))), Some(grant.expires_at_ms))
        }
        Ok(AcquireResult::Locked) => (Ok(None), None),
        Err(error) => (Err(code(&error)), None),
    }
}

fn released(answer: Result<ReleaseOutcome, LockError>) -> Answer<Outcome<Reason>> {
    let outcome = answer.map(|outcome| match outcome {
        ReleaseOutcome::Released => Outcome::Done,
        ReleaseOutcome::NotHeld(reason) => Outcome::Refused(reason),
        other => panic!("{other:?}"),
    });
    (outcome.map_err(|error| code(&error)), None)
}

fn extended(answer: Result<ExtendOutcome, LockError>) -> Answer<Outcome<Reason>> {
    match answer {
        Ok(ExtendOutcome::Extended { expires_at_ms }) => (Ok(Outcome::Done), Some(expires_at_ms)),
        Ok(ExtendOutcome::NotHeld(reason)) => (Ok(Outcome::Refused(reason)), None),
        Ok(other) => panic!("{other:?}"),
        Err(error) => (Err(code(&error)), None),
    }
}

/// `Refused(None)` stands for a row that was busy.
fn renewed(answer: Result<RenewOutcome, LockError>) -> Answer<Outcome<LostReason>> {
    match answer {
        Ok(RenewOutcome::Renewed { expires_at_ms, .. }) => (Ok(Outcome::Done), Some(expires_at_ms)),
        Ok(RenewOutcome::Lost(reason)) => (Ok(Outcome::Refused(Some(reason))), None),
        Ok(RenewOutcome::Busy) => (Ok(Outcome::Refused(None)), None),
        Ok(other) => panic!("{other:?}"),
        Err(error) => (Err(code(&error)), None),
    }
}

fn looked_up(answer: Result<Option<LockInfoRaw>, LockError>) -> Answer<Option<(String, String, u64)>> {
    match answer {
        Ok(Some(info)) => (Ok(Some((info.key, info.lock_id, info.fence.get()))), Some(info.expires_at_ms)),
        Ok(None) => (Ok(None), None),
        Err(error) => (Err(code(&error)), None),
    }
}
