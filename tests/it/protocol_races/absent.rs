//! The acquire that is one statement, in the races that only it runs: it looks with a snapshot that is
//! older than its locks, and tells from `xmax` whether somebody has the counter. Whatever it meets, the
//! answer is that of two messages; no fence is burnt and none is granted twice.

use std::sync::{Arc, Mutex, PoisonError};

use super::*;
use crate::support::proxy::BOUND;
use crate::support::{Action, Config, Proxy, Server, wait_until};

/// How the call travels: executed by its name, by the driver's own prepared statement, in two messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Executed,
    Bound,
    TwoMessages,
}

const ALL_FORMS: [Form; 3] = [Form::Executed, Form::Bound, Form::TwoMessages];

/// A client with one connection, all of whose messages are seen.
struct Rival {
    client: PgLockClient,
    name: String,
    form: Form,
    seen: Arc<Mutex<Vec<String>>>,
    // Goes last.
    _proxy: Proxy,
}

impl Rival {
    fn new(server: &Server, place: &Place, form: Form) -> Self {
        let (name, proxy, seen) =
            (unique(), Proxy::start(server.port()), Arc::<Mutex<Vec<String>>>::default());
        let list = Arc::clone(&seen);
        proxy.on_query(move |sql| {
            list.lock().unwrap_or_else(PoisonError::into_inner).push(sql.to_owned());
            Action::Pass
        });
        let mut config: postgres::Config = proxy.url(&place.schema.url()).parse().unwrap();
        config.application_name(&name);
        let builder = PgLockClient::builder().auto_create_tables(false).max_connections(1);
        let client = builder.operation_timeout(LIMIT).connect_with(config, postgres::NoTls).unwrap();
        let rival = Self { client, name, form, seen, _proxy: proxy };
        let spare = place.key("spare");
        wait_until(LIMIT, "the statement is called as it is to be called", || {
            rival.path();
            let grant = rival.client.acquire(&spare, TTL).unwrap().acquired().unwrap();
            let path = rival.path();
            assert_eq!(rival.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
            form != Form::Bound || path == ["acquire_absent by Bind"]
        });
        rival.path();
        rival
    }

    fn start(&self, key: &str) -> Call<Option<u64>> {
        let (client, key, two) = (self.client.clone(), key.to_owned(), self.form == Form::TwoMessages);
        Call::start(&self.name, move || {
            let answer = LockBackend::acquire(&client, &key, TTL, &token(two)).unwrap();
            answer.acquired().map(|grant| grant.fence.get())
        })
    }

    /// The statements that were called since the last look, one text for each message.
    fn path(&self) -> Vec<String> {
        let seen = std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner));
        let called = |sql: &String| {
            let names = sql.split("EXECUTE sg_").skip(1).filter_map(|call| {
                let name = call.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next()?;
                Some(name.rsplit_once('_')?.0.to_owned())
            });
            let names = names.collect::<Vec<_>>().join(" ");
            if sql.ends_with(BOUND) { names + BOUND } else { names }
        };
        seen.iter().map(called).filter(|names| !names.is_empty()).collect()
    }

    /// Whether the one statement decided, by the messages since the last look.
    fn was_fast(&self) -> bool {
        self.path().iter().map(|names| names.trim_end_matches(BOUND)).eq(["acquire_absent"])
    }
}

/// What is there, what strangers do in transactions that are open during the call, and what comes of it.
struct Scene {
    what: &'static str,
    /// `$` stands for the key.
    before: fn(&Place, &str),
    /// Each in a session of its own.
    strangers: &'static [&'static str],
    end: &'static str,
    /// Whether the call waits for the strangers.
    waits: bool,
    /// The fence that it gets, if any.
    first: Option<u64>,
    /// The same for a call afterwards, when all of them and a first grant are gone.
    then: Option<u64>,
    /// Whether the one statement decides, alone.
    fast: bool,
}

const INSERT: &str = "INSERT INTO syncguard_locks SELECT '$', left(md5('$'), 22), now + 30000, now, '000000000000009', '$' \
     FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8 AS now) AS clock";
const COUNT: &str = "INSERT INTO syncguard_fence_counters AS c (fence_key, fence) VALUES ('fence:$', 5) \
     ON CONFLICT (fence_key) DO UPDATE SET fence = c.fence + 5";
const RAISE: &str = "UPDATE syncguard_fence_counters SET fence = fence + 5 WHERE fence_key = 'fence:$'";
const SHARE: &str = "SELECT FROM syncguard_fence_counters WHERE fence_key = 'fence:$' FOR SHARE";
const KEY_SHARE: &str = "SELECT FROM syncguard_fence_counters WHERE fence_key = 'fence:$' FOR KEY SHARE";

fn nothing(_: &Place, _: &str) {}

/// As grants leave it: written over, so that it names its own transaction in `xmax`.
fn counted(place: &Place, key: &str) {
    (6..=7).for_each(|fence| place.stored.set_counter(key, fence));
    assert_eq!(xids(place, key).0, xids(place, key).1);
}

/// An update that was rolled back stays in the row's `xmax`.
fn raised_in_vain(place: &Place, key: &str) {
    counted(place, key);
    place.stored.run(&format!("BEGIN; {}; ROLLBACK", RAISE.replace('$', key)));
    let (xmin, xmax) = xids(place, key);
    assert!(xmax != 0 && xmax != xmin);
}

/// So does a lock of a transaction that is over.
fn shared(place: &Place, key: &str) {
    counted(place, key);
    transaction(place, &SHARE.replace('$', key)).batch_execute("COMMIT").unwrap();
    let (xmin, xmax) = xids(place, key);
    assert!(xmax != 0 && xmax != xmin);
}

/// And one of two, with a number that says nothing about them.
fn shared_once(place: &Place, key: &str) {
    counted(place, key);
    let mut both = [0, 1].map(|_| transaction(place, &SHARE.replace('$', key)));
    both.iter_mut().for_each(|one| one.batch_execute("COMMIT").unwrap());
    let (xmin, xmax) = xids(place, key);
    assert!(xmax != 0 && xmax != xmin);
}

/// By a transaction within a transaction.
fn counted_in_a_savepoint(place: &Place, key: &str) {
    counted(place, key);
    let upsert = COUNT.replace('$', key);
    place.stored.run(&format!(
        "BEGIN; SAVEPOINT a; {upsert}; RELEASE a; SAVEPOINT b; {upsert}; ROLLBACK TO b; COMMIT"
    ));
    assert_eq!(place.stored.counter(key), Some(12));
}

fn frozen(place: &Place, key: &str) {
    counted(place, key);
    let sql = "SELECT age(c.relfrozenxid) < age(f.xmin) FROM pg_class AS c, syncguard_fence_counters AS f \
               WHERE c.oid = 'syncguard_fence_counters'::regclass AND f.fence_key = 'fence:' || $1";
    wait_until(LIMIT, "the counter is frozen", || {
        place.stored.run("VACUUM FREEZE syncguard_fence_counters");
        place.stored.one(sql, &[&key]).get(0)
    });
    assert_eq!(xids(place, key).1, 0);
}

/// A live lease, whose release is under way in the scene.
fn held(place: &Place, key: &str) {
    place.stored.write(key, &id("holder"), 30_000, 7);
}

/// `xmin` and `xmax` of the key's counter.
fn xids(place: &Place, key: &str) -> (i64, i64) {
    let sql = "SELECT xmin::text::int8, xmax::text::int8 FROM syncguard_fence_counters WHERE fence_key = 'fence:' || $1";
    let row = place.stored.one(sql, &[&key]);
    (row.get(0), row.get(1))
}

#[rustfmt::skip]
const SCENES: &[Scene] = &[
    Scene { what: "a row that is written", before: nothing, strangers: &[INSERT], end: "COMMIT", waits: true, first: None, then: None, fast: false },
    Scene { what: "a row that is taken back", before: nothing, strangers: &[INSERT], end: "ROLLBACK", waits: true, first: Some(1), then: Some(2), fast: true },
    Scene { what: "a row that is written, of a counted key", before: counted, strangers: &[INSERT], end: "COMMIT", waits: true, first: None, then: None, fast: false },
    Scene { what: "a row that is taken back, of a counted key", before: counted, strangers: &[INSERT], end: "ROLLBACK", waits: true, first: Some(8), then: Some(9), fast: true },
    Scene { what: "a first counter that is written", before: nothing, strangers: &[COUNT], end: "COMMIT", waits: true, first: Some(6), then: Some(7), fast: true },
    Scene { what: "a first counter that is taken back", before: nothing, strangers: &[COUNT], end: "ROLLBACK", waits: true, first: Some(1), then: Some(2), fast: true },
    Scene { what: "a counter that is raised", before: counted, strangers: &[RAISE], end: "COMMIT", waits: false, first: None, then: Some(13), fast: false },
    Scene { what: "a counter that is raised in vain", before: counted, strangers: &[RAISE], end: "ROLLBACK", waits: false, first: None, then: Some(8), fast: false },
    Scene { what: "a counter that is upserted", before: counted, strangers: &[COUNT], end: "COMMIT", waits: false, first: None, then: Some(13), fast: false },
    Scene { what: "a counter that was raised in vain", before: raised_in_vain, strangers: &[], end: "", waits: false, first: Some(8), then: Some(9), fast: true },
    Scene { what: "a counter that was raised in a savepoint", before: counted_in_a_savepoint, strangers: &[], end: "", waits: false, first: Some(13), then: Some(14), fast: false },
    Scene { what: "a fenced transaction", before: counted, strangers: &[SHARE], end: "COMMIT", waits: false, first: None, then: Some(8), fast: false },
    Scene { what: "a fenced transaction that is over", before: shared, strangers: &[], end: "", waits: false, first: Some(8), then: Some(9), fast: true },
    Scene { what: "a second fenced transaction", before: shared, strangers: &[SHARE], end: "COMMIT", waits: false, first: None, then: Some(8), fast: false },
    Scene { what: "two fenced transactions", before: counted, strangers: &[SHARE, SHARE], end: "COMMIT", waits: false, first: None, then: Some(8), fast: false },
    Scene { what: "two fenced transactions that are over", before: shared_once, strangers: &[], end: "", waits: false, first: Some(8), then: Some(9), fast: false },
    Scene { what: "two locks that let the counter be raised", before: counted, strangers: &[KEY_SHARE, KEY_SHARE], end: "COMMIT", waits: false, first: Some(8), then: Some(9), fast: false },
    Scene { what: "a frozen counter", before: frozen, strangers: &[], end: "", waits: false, first: Some(8), then: Some(9), fast: true },
    Scene { what: "a fenced transaction on a frozen counter", before: frozen, strangers: &[SHARE], end: "ROLLBACK", waits: false, first: None, then: Some(8), fast: false },
    Scene { what: "a frozen counter that is raised", before: frozen, strangers: &[RAISE], end: "ROLLBACK", waits: false, first: None, then: Some(8), fast: false },
    Scene { what: "a release that is under way", before: held, strangers: &["DELETE FROM syncguard_locks WHERE key = '$'"], end: "COMMIT", waits: false, first: None, then: Some(8), fast: true },
    Scene { what: "somebody before it in the queue", before: counted, strangers: &["SELECT pg_advisory_xact_lock(hashtext('$'))"], end: "COMMIT", waits: true, first: Some(8), then: Some(9), fast: false },
    Scene { what: "a counter that grants left", before: counted, strangers: &[], end: "", waits: false, first: Some(8), then: Some(9), fast: true },
];

#[test]
fn an_acquire_in_one_statement_decides_as_two_messages_do_whatever_is_under_way() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let rivals = ALL_FORMS.map(|form| Rival::new(&server, &place, form));
    for (n, scene) in SCENES.iter().enumerate() {
        for rival in &rivals {
            let what = format!("{}, {:?}", scene.what, rival.form);
            let key = place.key(&format!("{n}-{:?}", rival.form));
            (scene.before)(&place, &key);
            rival.path();
            let mut strangers: Vec<_> =
                scene.strangers.iter().map(|sql| transaction(&place, &sql.replace('$', &key))).collect();
            let before = place.stored.counter(&key);
            let call = rival.start(&key);
            assert_eq!(call.settle(&place.stored), scene.waits, "{what}: whether it waits");
            if !scene.waits && scene.first.is_none() {
                // At once means: before the strangers are gone.
                assert_eq!(call.join(), None, "{what}");
                assert_eq!(place.stored.counter(&key), before, "{what}: a fence was burnt");
                end(&mut strangers, scene.end);
            } else {
                end(&mut strangers, scene.end);
                let fence = call.join();
                assert_eq!(fence, scene.first, "{what}");
                if fence.is_none() {
                    assert_eq!(place.stored.counter(&key), before, "{what}: a fence was burnt");
                }
            }
            if rival.form != Form::TwoMessages {
                assert_eq!(rival.was_fast(), scene.fast, "{what}: whether the one statement decided");
            }
            if let Some(fence) = scene.first {
                let row = place.stored.row(&key).unwrap();
                assert_eq!((row.fence, place.stored.counter(&key)), granted(fence), "{what}");
                place.stored.remove(&key);
            }
            let fence = rival.start(&key).join();
            assert_eq!(fence, scene.then, "{what}: afterwards");
            let Some(fence) = fence else { continue };
            assert_eq!(place.stored.counter(&key), granted(fence).1, "{what}: afterwards");
            // A counter that was granted from is one for the one statement again.
            place.stored.remove(&key);
            rival.path();
            assert_eq!(rival.start(&key).join(), Some(fence + 1), "{what}: in the end");
            assert!(rival.form == Form::TwoMessages || rival.was_fast(), "{what}: in the end");
        }
    }
}

fn end(strangers: &mut Vec<Client>, how: &str) {
    strangers.drain(..).for_each(|mut stranger| stranger.batch_execute(how).unwrap());
}

/// What is in the row and in the counter after this grant.
fn granted(fence: u64) -> (String, Option<i64>) {
    (format!("{fence:015}"), Some(i64::try_from(fence).unwrap()))
}

/// After what the statement stands still: a trigger waits until the gate is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gap {
    /// Its snapshot is taken, and nothing else was done.
    Snapshot,
    /// It has the queue's lock, has looked, and goes to the counter.
    Look,
    /// It has raised the counter, and goes to the row.
    Counter,
}

/// What others do there and commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// Of another client.
    Acquire,
    /// Of another client.
    AcquireAndRelease,
    /// Of somebody who does not queue.
    Insert,
    InsertAndDelete,
    Raise,
    /// A fenced transaction begins, and goes on for a while.
    Share,
}

/// The fence that the call gets then, of a key that was granted seven times.
#[rustfmt::skip]
const GAPS: &[(Gap, Deed, Option<u64>)] = &[
    (Gap::Snapshot, Deed::Acquire, None),
    (Gap::Snapshot, Deed::AcquireAndRelease, Some(9)),
    (Gap::Snapshot, Deed::Insert, None),
    (Gap::Snapshot, Deed::InsertAndDelete, Some(8)),
    (Gap::Snapshot, Deed::Raise, Some(13)),
    // What is in `xmax` is no matter of snapshots.
    (Gap::Snapshot, Deed::Share, None),
    (Gap::Look, Deed::Insert, None),
    (Gap::Look, Deed::InsertAndDelete, Some(8)),
    (Gap::Look, Deed::Raise, Some(13)),
    (Gap::Look, Deed::Share, Some(8)),
    (Gap::Counter, Deed::Insert, None),
    (Gap::Counter, Deed::InsertAndDelete, Some(8)),
];

/// A session that has the gate closed as long as it lives.
fn gate(place: &Place, gap: Gap, name: &str) -> Client {
    let (table, level) = match gap {
        Gap::Snapshot => ("syncguard_fence_counters", "STATEMENT"),
        Gap::Look => ("syncguard_fence_counters", "ROW"),
        Gap::Counter => ("syncguard_locks", "ROW"),
    };
    place.stored.run(&format!(
        "CREATE OR REPLACE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           IF current_setting('application_name') = TG_ARGV[0] THEN PERFORM pg_advisory_xact_lock_shared(7, 7); END IF; \
           RETURN NEW; END $$; \
         DROP TRIGGER IF EXISTS gate ON syncguard_locks; DROP TRIGGER IF EXISTS gate ON syncguard_fence_counters; \
         CREATE TRIGGER gate BEFORE INSERT ON {table} FOR EACH {level} EXECUTE FUNCTION gate('{name}')"
    ));
    let mut closed = place.schema.client();
    closed.batch_execute("SELECT pg_advisory_lock(7, 7)").unwrap();
    closed
}

/// What is done in the gap; `Some` if it goes on.
fn perform_deed(place: &Place, deed: Deed, key: &str) -> Option<Client> {
    match deed {
        Deed::Acquire => drop(place.hold(key)),
        Deed::AcquireAndRelease => {
            let grant = place.hold(key);
            assert_eq!(place.client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
        }
        Deed::Insert => place.stored.run(&INSERT.replace('$', key)),
        Deed::InsertAndDelete => {
            place.stored.run(&INSERT.replace('$', key));
            place.stored.remove(key);
        }
        Deed::Raise => place.stored.run(&RAISE.replace('$', key)),
        Deed::Share => return Some(transaction(place, &SHARE.replace('$', key))),
    }
    None
}

#[test]
fn what_happens_between_the_snapshot_of_an_acquire_in_one_statement_and_its_writes_is_seen() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let rivals = [Form::Executed, Form::Bound].map(|form| Rival::new(&server, &place, form));
    for (n, (gap, deed, expected)) in GAPS.iter().enumerate() {
        for rival in &rivals {
            let what = format!("{deed:?} after {gap:?}, {:?}", rival.form);
            let key = place.key(&format!("{n}-{:?}", rival.form));
            counted(&place, &key);
            let gate = gate(&place, *gap, &rival.name);
            rival.path();
            let call = rival.start(&key);
            call.wait_until_blocked(&place.stored);
            assert_eq!(rival.path().len(), 1, "{what}: it stands still in its first message");
            let mut goes_on = perform_deed(&place, *deed, &key);
            let counter = place.stored.counter(&key);
            drop(gate);
            let mut ended_ms = 0;
            if let (Some(fenced), Some(_)) = (&mut goes_on, expected) {
                wait_until(LIMIT, "it waits for the fenced transaction", || {
                    let sql = "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) \
                               WHERE NOT granted AND locktype <> 'advisory' AND application_name = $1)";
                    place.stored.one(sql, &[&rival.name]).get(0)
                });
                place.wait_for(place.stored.now_ms() + 20);
                ended_ms = place.stored.now_ms();
                fenced.batch_execute("COMMIT").unwrap();
            }
            assert_eq!(call.join(), *expected, "{what}");
            match *expected {
                // The other's grant, if there was one, and nothing more.
                None => assert_eq!(place.stored.counter(&key), counter, "{what}: a fence was burnt"),
                Some(fence) => {
                    let row = place.stored.row(&key).unwrap();
                    assert!(row.acquired_at_ms >= ended_ms, "{what}: dated before the end of its wait");
                    assert_eq!((row.fence, place.stored.counter(&key)), granted(fence), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_trace_of_a_fenced_transaction_counts_as_a_lock_only_while_something_older_runs() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let key = place.key("traced");
    let rivals = [Form::Executed, Form::Bound].map(|form| Rival::new(&server, &place, form));
    for rival in &rivals {
        let older = transaction(&place, "SELECT pg_current_xact_id()");
        shared(&place, &key);
        for (older, fence, fast) in [(Some(older), 8, false), (None, 9, true)] {
            rival.path();
            let call = rival.start(&key);
            assert!(!call.settle(&place.stored), "neither waits");
            assert_eq!(call.join(), Some(fence));
            assert_eq!(rival.was_fast(), fast, "{:?}, fence {fence}", rival.form);
            older.into_iter().for_each(|mut older| older.batch_execute("COMMIT").unwrap());
            place.stored.remove(&key);
            transaction(&place, &SHARE.replace('$', &key)).batch_execute("COMMIT").unwrap();
        }
        place.stored.run("DELETE FROM syncguard_fence_counters");
    }
}

/// Numbers of multixacts are counted for themselves: one may be that of the transaction that wrote the
/// row, and then `xmax` does not say that somebody has it.
#[test]
fn fenced_transactions_whose_multixact_has_the_number_of_the_rows_writer_are_waited_for() {
    let server = Server::start(&Config::new());
    let place = Place::new(server.schema());
    let (a, spin) = (place.key("a"), place.key("spin"));
    let rival = Rival::new(&server, &place, Form::Bound);
    place.stored.set_counter(&spin, 1);
    counted(&place, &a);
    let writer = xids(&place, &a).0;
    let mut pair = [0, 1].map(|_| transaction(&place, "SELECT"));
    let mut share = |key: &str| {
        pair.iter_mut().for_each(|one| one.batch_execute("COMMIT").unwrap());
        let sql = format!("BEGIN; {}", SHARE.replace('$', key));
        pair.iter_mut().for_each(|one| one.batch_execute(&sql).unwrap());
        xids(&place, key).1
    };
    let mut last = share(&spin);
    // Most of the way at once: each transaction within the transaction makes another multixact.
    let most = writer - last - 50;
    place.stored.run(&format!(
        "CREATE TABLE spin (n int); INSERT INTO spin VALUES (1); \
         DO $$ BEGIN PERFORM FROM spin FOR KEY SHARE; FOR n IN 1..{most} LOOP \
           BEGIN PERFORM FROM spin FOR UPDATE; RAISE EXCEPTION 'on'; EXCEPTION WHEN raise_exception THEN NULL; END; \
         END LOOP; END $$"
    ));
    while last < writer - 1 {
        last = share(&spin);
    }
    assert_eq!(share(&a), writer, "the number of the row's writer");
    rival.path();
    let call = rival.start(&a);
    call.wait_until_blocked(&place.stored);
    assert_eq!(place.stored.row(&a), None);
    pair.iter_mut().for_each(|one| one.batch_execute("COMMIT").unwrap());
    assert_eq!(call.join(), Some(8));
    assert!(rival.was_fast());
    assert_eq!(place.stored.counter(&a), Some(8));
}
