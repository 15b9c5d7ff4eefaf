//! What a history is made of, and how one is drawn at random.

use proptest::prelude::*;
use syncguard::backend::MarkStep;

/// How many keys, and how many clients that contend for them.
pub(crate) const KEYS: usize = 3;
pub(crate) const CLIENTS: usize = 3;
/// The greatest limit of the semaphore.
pub(crate) const PERMITS: u32 = 3;

/// All ttls are half a second off a whole one and all pauses are whole seconds, so that every moment
/// at which something is decided is half a second away from the edge of every lease: the few
/// milliseconds that pass by themselves on a server change no decision.
pub(crate) const TTLS_MS: [i64; 5] = [500, 1_500, 3_500, 30_500, 86_400_500];

/// What one client does, or what happens to a key behind the clients' backs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// An acquire with an id that the backend chooses.
    Acquire {
        key: usize,
        ttl: usize,
        form: Form,
    },
    /// An attempt with a new id, which becomes the client's id for the key.
    Attempt {
        key: usize,
        client: usize,
        ttl: usize,
        form: Form,
    },
    /// An attempt with the client's last id for the key, as after a lost answer.
    Again {
        key: usize,
        client: usize,
        ttl: usize,
        form: Form,
    },
    /// An attempt for one key with an id that was meant for another.
    Stray {
        key: usize,
        other: usize,
        client: usize,
        form: Form,
    },
    Release {
        id: Id,
        form: Form,
    },
    /// A release that no token stops, as guards make it.
    ReleaseBy {
        id: Id,
    },
    Extend {
        id: Id,
        ttl: usize,
        form: Form,
    },
    IsLocked {
        key: usize,
        form: Form,
    },
    Holder {
        key: usize,
        form: Form,
    },
    LookupKey {
        key: usize,
        form: Form,
    },
    LookupId {
        id: Id,
        form: Form,
    },
    /// One batch, of the clients' leases of the keys whose bit is set.
    Renew {
        clients: Clients,
        ttl: usize,
    },
    /// So many seconds go by, or the server's clock is set back.
    Pass {
        seconds: i64,
    },
    /// The key's lease ended so long ago; if negative, it has that long to live.
    Age {
        key: usize,
        past_ms: i64,
    },
    /// Somebody else holds the key now, whoever had it.
    TakeOver {
        key: usize,
    },
    /// The key's row is deleted.
    Remove {
        key: usize,
    },
    /// An operator breaks the key's lock.
    Break {
        key: usize,
    },
    /// An operator deletes what is long over.
    CleanUp,
    /// The key's fence counter is set.
    Counter {
        key: usize,
        value: u64,
    },
    /// What sets, permits and runs do.
    Kind(Kind),
}

/// What is done beside plain locks, on the same keys.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// An attempt for the keys that have a client, with new ids, or with the last ones.
    AttemptAll {
        clients: Clients,
        fresh: bool,
        ttl: usize,
        form: Form,
    },
    ReleaseAll {
        clients: Clients,
    },
    /// An attempt for a permit of the semaphore with the first key's name, with a new id, or the last one.
    Permit {
        client: usize,
        limit: u32,
        fresh: bool,
        ttl: usize,
        form: Form,
    },
    InUse {
        form: Form,
    },
    /// Of a job with the key's name. Only slots with numbers: periods would be those of a clock that runs.
    Begin {
        key: usize,
        client: usize,
        slot: u64,
        fresh: bool,
        ttl: usize,
        form: Form,
    },
    /// Of the client's last run of this job.
    Mark {
        key: usize,
        client: usize,
        step: MarkStep,
    },
    /// The same in a transaction of the caller's.
    Complete {
        key: usize,
        client: usize,
    },
    SetMark {
        key: usize,
        slot: u64,
    },
}

pub(crate) type Clients = [Option<usize>; KEYS];

/// One message to the server, or two with a look at the token in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    One,
    Two,
}

/// A lock id: a client's last one for a key, the last one a backend chose for it, or a stranger's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Id {
    Mine { key: usize, client: usize },
    Permit { client: usize },
    Chosen { key: usize },
    Stranger { key: usize },
}

pub(crate) fn history() -> impl Strategy<Value = Vec<Step>> {
    // Steps that leave nothing behind are rarer than steps that others can meet.
    let step = prop_oneof![
        6 => (keys(), clients(), ttls(), forms())
            .prop_map(|(key, client, ttl, form)| Step::Attempt { key, client, ttl, form }),
        3 => (keys(), clients(), ttls(), forms())
            .prop_map(|(key, client, ttl, form)| Step::Again { key, client, ttl, form }),
        1 => (keys(), ttls(), forms()).prop_map(|(key, ttl, form)| Step::Acquire { key, ttl, form }),
        1 => (keys(), keys(), clients(), forms())
            .prop_map(|(key, other, client, form)| Step::Stray { key, other, client, form }),
        3 => (ids(), forms()).prop_map(|(id, form)| Step::Release { id, form }),
        1 => ids().prop_map(|id| Step::ReleaseBy { id }),
        4 => (ids(), ttls(), forms()).prop_map(|(id, ttl, form)| Step::Extend { id, ttl, form }),
        1 => (keys(), forms()).prop_map(|(key, form)| Step::IsLocked { key, form }),
        1 => (keys(), forms()).prop_map(|(key, form)| Step::Holder { key, form }),
        1 => (keys(), forms()).prop_map(|(key, form)| Step::LookupKey { key, form }),
        1 => (ids(), forms()).prop_map(|(id, form)| Step::LookupId { id, form }),
        2 => (prop::array::uniform3(prop::option::weighted(0.7, clients())), ttls())
            .prop_map(|(clients, ttl)| Step::Renew { clients, ttl }),
        6 => prop_oneof![8 => 1_i64..6, 1 => Just(-3), 1 => Just(90)].prop_map(|seconds| Step::Pass { seconds }),
        1 => (keys(), prop::sample::select(vec![-5_500, -500, 500, 1_500]))
            .prop_map(|(key, past_ms)| Step::Age { key, past_ms }),
        1 => keys().prop_map(|key| Step::TakeOver { key }),
        1 => keys().prop_map(|key| Step::Remove { key }),
        1 => keys().prop_map(|key| Step::Break { key }),
        1 => Just(Step::CleanUp),
        1 => (keys(), counters()).prop_map(|(key, value)| Step::Counter { key, value }),
    ];
    let step = prop_oneof![3 => step, 2 => kinds().prop_map(Step::Kind)];
    prop::collection::vec(step, 1..20)
}

fn kinds() -> impl Strategy<Value = Kind> + Clone {
    let slots = || 0_u64..5;
    let steps = prop::sample::select(vec![MarkStep::Claim, MarkStep::Finish, MarkStep::Verify]);
    prop_oneof![
        4 => (several(), prop::bool::weighted(0.7), ttls(), forms())
            .prop_map(|(clients, fresh, ttl, form)| Kind::AttemptAll { clients, fresh, ttl, form }),
        2 => several().prop_map(|clients| Kind::ReleaseAll { clients }),
        5 => (clients(), 1..=PERMITS, prop::bool::weighted(0.7), ttls(), forms())
            .prop_map(|(client, limit, fresh, ttl, form)| Kind::Permit { client, limit, fresh, ttl, form }),
        1 => forms().prop_map(|form| Kind::InUse { form }),
        4 => (keys(), clients(), slots(), prop::bool::weighted(0.8), ttls(), forms()).prop_map(
            |(key, client, slot, fresh, ttl, form)| Kind::Begin { key, client, slot, fresh, ttl, form }
        ),
        4 => (keys(), clients(), steps).prop_map(|(key, client, step)| Kind::Mark { key, client, step }),
        2 => (keys(), clients()).prop_map(|(key, client)| Kind::Complete { key, client }),
        1 => (keys(), slots()).prop_map(|(key, slot)| Kind::SetMark { key, slot }),
    ]
}

/// At least one key.
fn several() -> impl Strategy<Value = Clients> + Clone {
    (prop::array::uniform3(prop::option::weighted(0.6, clients())), keys(), clients()).prop_map(
        |(mut all, key, client)| {
            all[key] = Some(client);
            all
        },
    )
}

fn keys() -> impl Strategy<Value = usize> + Clone {
    // Most of it happens to one key: histories are short.
    prop_oneof![3 => Just(0_usize), 1 => 1..KEYS]
}

fn clients() -> impl Strategy<Value = usize> + Clone {
    0..CLIENTS
}

fn ttls() -> impl Strategy<Value = usize> + Clone {
    0..TTLS_MS.len()
}

fn forms() -> impl Strategy<Value = Form> + Clone {
    prop_oneof![Just(Form::One), Just(Form::Two)]
}

fn ids() -> impl Strategy<Value = Id> {
    prop_oneof![
        8 => (keys(), clients()).prop_map(|(key, client)| Id::Mine { key, client }),
        1 => clients().prop_map(|client| Id::Permit { client }),
        1 => keys().prop_map(|key| Id::Chosen { key }),
        1 => keys().prop_map(|key| Id::Stranger { key }),
    ]
}

/// Small, near the warning, at the limit and beyond it, with a digit more than a fence may have.
fn counters() -> impl Strategy<Value = u64> {
    use syncguard::{FENCE_MAX, FENCE_WARN};
    let values = vec![0, 7, FENCE_WARN, FENCE_MAX - 1, FENCE_MAX, FENCE_MAX + 1, 1_000_000_000_000_000];
    prop::sample::select(values)
}
