//! Every call returns within its computed bound and a second, whatever is missing, and says what.

use std::error::Error as _;
use std::time::{Duration, Instant};

use postgres::NoTls;
use syncguard::{
    Acquired, AdvisoryKey, AdvisoryOptions, ErrorCode, ExtendResult, LockError, LockGuard, LockOptions,
    Lookup, PgLockClient, PgLockClientBuilder, ReleaseResult,
};

use crate::support::standby::signal_waits_for_a_standby;
use crate::support::{self, Action, Config, Network, Proxy, Server, TestSchema, wait_for, wait_until};

const LIMIT: Duration = Duration::from_millis(500);
const TTL: Duration = Duration::from_secs(30);
const ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

pub fn builder() -> PgLockClientBuilder {
    PgLockClient::builder().operation_timeout(LIMIT).connection_timeout(LIMIT).dispose_timeout(LIMIT)
}

/// A client whose tables are there and whose connection is open, however long that took.
fn connected(builder: impl Fn() -> PgLockClientBuilder, url: &str) -> PgLockClient {
    wait_for(support::LIMIT, "the tables are there", || builder().connect(url).ok())
}

/// A grant of a free key, at the first call that was in time.
fn granted(client: &PgLockClient, key: &str) -> Acquired {
    wait_for(support::LIMIT, "it is granted in time", || client.acquire(key, TTL).ok()?.acquired())
}

fn held(client: &PgLockClient, key: &str) -> LockGuard {
    wait_for(support::LIMIT, "it is granted in time", || client.lock(key).ok())
}

/// An error with its causes.
fn chain(error: &LockError) -> String {
    let mut text = format!("{}: {error}", error.code());
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// How often a call is made again whose better error came too late: where the machine is busy the server
/// may end a wait after we did.
const TRIES: usize = 5;

/// Makes one call of every kind; each must be over in time, and each error must say one of these words.
#[track_caller]
pub fn all_in_time(what: &str, client: &PgLockClient, words: &[&str], writes_only: bool) {
    let options = LockOptions::new().timeout(LIMIT);
    let mut longest = Duration::ZERO;
    let mut call = |name: &str, bound: Duration, call: &dyn Fn() -> Option<LockError>| {
        let mut text = String::new();
        for _ in 0..TRIES {
            let start = Instant::now();
            let error = call();
            let took = start.elapsed();
            longest = longest.max(took.saturating_sub(bound));
            assert!(
                took <= bound + Duration::from_secs(1),
                "{what}: {name} took {took:?}, its bound is {bound:?}"
            );
            let Some(error) = error else {
                assert!(writes_only, "{what}: {name} cannot have worked");
                return;
            };
            text = chain(&error);
            assert!(!text.contains("somebody else"), "{what}: {name} cannot know that: {text}");
            if words.iter().any(|word| text.contains(word)) {
                return;
            }
        }
        panic!("{what}: {name} does not say what was missing: {text}");
    };
    call("acquire", LIMIT, &|| client.acquire("k", TTL).err());
    call("extend", LIMIT, &|| client.extend(ID, TTL).err());
    call("release", LIMIT, &|| client.release(ID).err());
    call("is_locked", LIMIT, &|| client.is_locked("k").err());
    call("lookup", LIMIT, &|| client.lookup(Lookup::Key("k")).err());
    call("owns", LIMIT, &|| client.owns(ID).err());
    call("try_lock", LIMIT, &|| client.try_lock_with("k", &options).err());
    call("lock", LIMIT, &|| client.lock_with("k", &options).err());
    call("with_lock", LIMIT, &|| client.with_lock("k", &options, |_| ()).err());
    call("setup_schema", 6 * LIMIT, &|| client.setup_schema().err());
    let (operator, key) = (client.operator(), AdvisoryKey::from_text(&support::unique()));
    call("counts", LIMIT, &|| operator.counts().err());
    call("holders", LIMIT, &|| operator.holders(1).err());
    call("waiters", LIMIT, &|| operator.blocked("k").err());
    call("break_lock", LIMIT, &|| operator.break_lock("k", "a test").err());
    call("cleanup_expired", LIMIT, &|| operator.cleanup_expired(1).err());
    let advisory = AdvisoryOptions::new().timeout(LIMIT);
    call("try_advisory_lock", LIMIT, &|| client.try_advisory_lock(&key).err());
    call("advisory_lock", LIMIT, &|| client.advisory_lock_with(&key, &advisory).err());
    call("advisory_holders", LIMIT, &|| client.advisory_holders().err());
    call("terminate_advisory_session", LIMIT, &|| client.terminate_advisory_session(1).err());
    println!("{what}: the longest call ended {longest:?} after its bound");
}

/// Makes this call until it fails with the error that is expected; each must fail, and be over in time.
#[track_caller]
fn fails_in_time<R>(
    name: &str,
    call: impl Fn() -> syncguard::Result<R>,
    expected: impl Fn(&LockError) -> bool,
) {
    let mut text = String::new();
    for _ in 0..TRIES {
        let (took, result) = timed(&call);
        assert!(took < LIMIT + Duration::from_secs(1), "{name} took {took:?}");
        let Err(error) = result else { panic!("{name} cannot have worked") };
        text = chain(&error);
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{name}: {text}");
        if expected(&error) {
            return;
        }
    }
    panic!("{name} does not say what was missing: {text}");
}

/// Whether the server has refused to wait for a lock that others have.
fn is_of_a_lock(error: &LockError) -> bool {
    chain(error).contains("lock") && !error.is_outcome_unknown()
}

/// Drops and closes are calls, too.
#[track_caller]
pub fn ends_in_time(what: &str, client: PgLockClient) {
    let start = Instant::now();
    let _ = client.close(LIMIT);
    drop(client);
    let took = start.elapsed();
    assert!(took < LIMIT + Duration::from_secs(1), "{what}: close and drop took {took:?}");
}

#[test]
fn a_silent_server() {
    let server = Server::start(&Config::new());
    let client = connected(builder, server.url());
    let guard = held(&client, "held");
    server.freeze();
    all_in_time("a silent server", &client, &["NetworkTimeout", "did not answer", "time for this"], false);
    let start = Instant::now();
    drop(guard);
    assert!(start.elapsed() < LIMIT + Duration::from_secs(1), "a guard's drop took {:?}", start.elapsed());
    ends_in_time("a silent server", client);
    server.thaw();
}

/// On an open connection every statement is called by the driver's own protocol from now on.
fn settle(client: &PgLockClient) {
    let settled = || -> syncguard::Result<()> {
        let key = support::unique();
        let held = client.acquire(&key, TTL)?.acquired().expect("it is free");
        for _ in 0..20 {
            assert!(client.acquire(&key, TTL)?.acquired().is_none());
            assert!(matches!(client.extend(&held.lock_id, TTL)?, ExtendResult::Extended { .. }));
            assert!(client.is_locked(&key)? && client.owns(&held.lock_id)?);
            assert_eq!(client.release(ID)?, ReleaseResult::NotHeld);
        }
        assert_eq!(client.release(&held.lock_id)?, ReleaseResult::Released);
        Ok(())
    };
    // A call that came too late has cost the connection.
    wait_until(support::LIMIT, "all of these calls are in time", || settled().is_ok());
}

#[test]
fn a_silent_server_behind_statements_that_are_called_often() {
    let server = Server::start(&Config::new());
    let proxy = Proxy::start(server.port());
    let client = connected(builder, &proxy.url(server.url()));
    wait_until(support::LIMIT, "a call by Bind is in time", || {
        settle(&client);
        let before = proxy.bound();
        client.acquire("k", TTL).is_ok() && proxy.bound() > before
    });
    server.freeze();
    let words = ["NetworkTimeout", "did not answer", "time for this"];
    all_in_time("a silent server, called by Bind", &client, &words, false);
    ends_in_time("a silent server, called by Bind", client);
    server.thaw();
}

#[test]
fn a_table_that_is_locked_under_statements_that_are_called_often() {
    let server = Server::start(&Config::new());
    let client = connected(builder, server.url());
    let mut sql = server.client();
    for _ in 0..2 {
        settle(&client);
        let mut transaction = sql.transaction().unwrap();
        transaction.batch_execute("LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE").unwrap();
        for _ in 0..2 {
            fails_in_time("acquire", || client.acquire("k", TTL), is_of_a_lock);
        }
        drop(transaction);
    }
    ends_in_time("a locked table, called by Bind", client);
}

#[test]
fn a_black_hole_behind_open_connections_and_new_ones() {
    let schema = support::schema();
    for warm in [true, false] {
        let proxy = Proxy::start(support::server().port());
        let ready = PgLockClient::connect(&schema.url()).unwrap();
        drop(ready);
        let client = connected(|| builder().auto_create_tables(warm), &proxy.url(&schema.url()));
        let guard = warm.then(|| held(&client, "held"));
        proxy.network(Network::Mute);
        all_in_time("a black hole", &client, &["NetworkTimeout", "ServiceUnavailable", "no answer"], false);
        let start = Instant::now();
        drop(guard);
        assert!(
            start.elapsed() < LIMIT + Duration::from_secs(1),
            "a guard's drop took {:?}",
            start.elapsed()
        );
        ends_in_time("a black hole", client);
        proxy.network(Network::Open);
    }
}

#[test]
fn nobody_listens() {
    let schema = support::schema();
    let proxy = Proxy::start(support::server().port());
    let client = builder().auto_create_tables(false).connect(&proxy.url(&schema.url())).unwrap();
    proxy.network(Network::Refusing);
    all_in_time("nobody listens", &client, &["ServiceUnavailable"], false);
    ends_in_time("nobody listens", client);
}

#[test]
fn a_pool_whose_connections_are_all_taken() {
    let schema = support::schema();
    let proxy = Proxy::start(support::server().port());
    let long = Duration::from_secs(20);
    let single = || builder().operation_timeout(long).max_connections(1);
    let client = connected(single, &proxy.url(&schema.url()));
    wait_until(support::LIMIT, "the connection is open", || client.is_locked("warm").is_ok());
    proxy.once("EXECUTE sg_look", Action::SwallowAnswer);
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| client.is_locked("k"));
        wait_until(support::LIMIT, "the connection is taken", || proxy.count() == 1);
        for name in ["acquire", "is_locked", "lock"] {
            let start = Instant::now();
            let options = LockOptions::new().timeout(LIMIT);
            let error = match name {
                "acquire" => client.acquire("k", TTL).map(drop),
                "is_locked" => client.is_locked("k").map(drop),
                _ => client.lock_with("k", &options).map(drop),
            }
            .expect_err("there is no connection");
            // The connection timeout is shorter than the operation's.
            assert!(start.elapsed() < LIMIT + Duration::from_secs(1), "{name} took {:?}", start.elapsed());
            assert_eq!(error.code(), ErrorCode::RateLimited, "{}", chain(&error));
            assert!(chain(&error).contains("connection"), "{}", chain(&error));
        }
        proxy.cut_all();
        // Reads are simply asked again.
        assert!(taken.join().expect("no panic").is_ok());
    });
}

#[test]
fn a_callers_pool_whose_connections_are_all_taken() {
    let schema = support::schema();
    let pool = callers_pool(&schema);
    let client = wait_for(support::LIMIT, "the tables are there", || builder().build(pool.clone()).ok());
    let (_first, _second) = (pool.get().unwrap(), pool.get().unwrap());
    all_in_time("a caller's pool, exhausted", &client, &["RateLimited"], false);
}

/// A caller's pool of two connections.
fn callers_pool(schema: &TestSchema) -> r2d2::Pool<r2d2_postgres::PostgresConnectionManager<NoTls>> {
    let manager = r2d2_postgres::PostgresConnectionManager::new(schema.config(), NoTls);
    r2d2::Pool::builder().max_size(2).build(manager).unwrap()
}

/// A close has one deadline for everything: what has to wait must not take it from what has not.
#[test]
fn a_close_lets_leases_go_although_a_session_locks_server_is_silent() {
    let schema = support::schema();
    let proxy = Proxy::start(support::server().port());
    let patient = PgLockClient::builder().operation_timeout(LIMIT * 40);
    let client = patient.connect(&proxy.url(&schema.url())).unwrap();
    let warm = client.try_advisory_lock(&AdvisoryKey::from_text(schema.name())).unwrap();
    drop(warm);
    let guard = client.lock("k").unwrap();
    proxy.on_query(|sql| {
        if sql.contains("EXECUTE sg_try") || sql.contains("EXECUTE sg_timed_try") {
            Action::SwallowAnswer
        } else {
            Action::Pass
        }
    });
    let key = AdvisoryKey::from_text(schema.name());
    std::thread::scope(|scope| {
        let trying = scope.spawn(|| client.try_advisory_lock(&key).map(drop));
        wait_until(support::LIMIT, "the try is under way", || proxy.count() > 0);
        // Shorter than the try, and long enough for a release on a busy machine.
        let limit = LIMIT * 10;
        let (took, report) = timed(|| client.close(limit).unwrap());
        assert!(took < limit + Duration::from_secs(1), "it took {took:?}");
        assert_eq!((report.released, report.pending), (1, 0), "{report:?}");
        assert!(!report.threads_ended, "the try is not over: {report:?}");
        assert_eq!(guard.lost_reason(), Some(syncguard::LostReason::Closed));
        proxy.cut_all();
        assert!(trying.join().expect("no panic").is_err());
    });
}

/// What a first lock prepares for renewals takes its time out of the lock's own.
#[test]
fn a_short_wait_for_a_lock_is_short_although_an_operation_may_take_long() {
    let schema = support::schema();
    let pool = callers_pool(&schema);
    let long = LIMIT * 60;
    let client =
        PgLockClient::builder().operation_timeout(long).connection_timeout(long).build(pool.clone()).unwrap();
    let taken = (pool.get().unwrap(), pool.get().unwrap());
    let (took, result) = timed(|| client.lock_with("k", &LockOptions::new().timeout(LIMIT)).map(drop));
    let error = result.expect_err("there is no connection");
    assert!(took < LIMIT + Duration::from_secs(1), "it took {took:?}: {}", chain(&error));
    assert_eq!(error.code(), ErrorCode::RateLimited, "{}", chain(&error));
    // Nor does it hold up those who have more time, nor outlast a token.
    let token = syncguard::CancelToken::new();
    std::thread::scope(|scope| {
        let patient = scope.spawn(|| client.lock_with("k", &LockOptions::new().timeout(long)).map(drop));
        let cancelled = scope.spawn(|| client.cancellable(&token).try_lock("k").map(drop));
        std::thread::sleep(LIMIT / 2);
        token.cancel();
        let (took, result) = timed(|| cancelled.join().expect("no panic"));
        assert_eq!(result.expect_err("its token has fired").code(), ErrorCode::Aborted);
        assert!(took < Duration::from_secs(1), "its token ended it after {took:?}");
        drop(taken);
        patient.join().expect("no panic").expect("there are connections now");
    });
}

#[test]
fn a_table_that_a_stranger_has_locked() {
    let schema = support::schema();
    let client = connected(builder, &schema.url());
    let mut stranger = schema.client();
    stranger.batch_execute("BEGIN; LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE").unwrap();
    all_in_time("a locked table", &client, &["55P03"], true);
    // Nobody has given up on a server process that goes on waiting.
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database() \
                   AND query LIKE '%' || $1 || '%'";
    let mut observer = schema.client();
    wait_until(support::LIMIT, "no server process waits any more", || {
        observer.query_one(waiting, &[&schema.name()]).unwrap().get::<_, i64>(0) == 0
    });
    drop(stranger);
    // Afterwards all is well.
    drop(held(&client, "k"));
}

#[test]
fn a_key_that_a_stranger_has_locked_with_an_advisory_lock() {
    let schema = support::schema();
    let client = connected(builder, &schema.url());
    // Other tests on this server lock keys, too: this number is of no other.
    let mut stranger = schema.client();
    stranger.batch_execute("SELECT pg_advisory_lock(hashtext('the stranger''s'))").unwrap();
    fails_in_time("acquire", || client.acquire("the stranger's", TTL), is_of_a_lock);
}

#[test]
fn a_commit_that_waits_for_an_absent_standby() {
    let server = Server::start(&Config::new());
    let client = connected(builder, server.url());
    let (first, second) = (granted(&client, "held"), granted(&client, "held too"));
    server.configure("synchronous_standby_names", "nobody");
    // The server's processes hear of it one after the other.
    let mut keys = 0..;
    wait_until(support::LIMIT, "a commit waits for the standby", || {
        client.acquire(&format!("before {:?}", keys.next()), TTL).is_err()
    });
    let (options, unknown) = (LockOptions::new().timeout(LIMIT), LockError::is_outcome_unknown);
    fails_in_time("acquire", || client.acquire("k", TTL), unknown);
    fails_in_time("extend", || client.extend(&first.lock_id, TTL), unknown);
    fails_in_time("lock", || client.lock_with("k2", &options), unknown);
    // A release does not wait for a standby; only for a row whose extend still does.
    wait_until(support::LIMIT, "a connection is open again", || client.is_locked("warm").is_ok());
    client.release(&second.lock_id).expect("nobody has its row");
    server.configure("synchronous_standby_names", "");
    ends_in_time("an absent standby", client);
}

#[test]
fn a_cancelled_wait_for_a_standby_is_not_taken_for_a_confirmation() {
    let server = Server::start(&Config::new());
    let client = connected(|| builder().operation_timeout(Duration::from_secs(2)), server.url());
    client.is_locked("warm").unwrap();
    server.configure("synchronous_standby_names", "nobody");
    let mut sql = server.client();
    let result = signal_waits_for_a_standby(&mut sql, "pg_cancel_backend", || client.acquire("k", TTL));
    let error = result.expect_err("no standby has it");
    assert!(error.is_outcome_unknown() && chain(&error).contains("standby"), "{}", chain(&error));
    server.configure("synchronous_standby_names", "");
}

fn timed<R>(call: impl FnOnce() -> R) -> (Duration, R) {
    let start = Instant::now();
    let result = call();
    (start.elapsed(), result)
}

#[test]
fn a_server_without_free_connections() {
    let server = Server::start(&Config::new().set("max_connections", "10"));
    drop(PgLockClient::connect(server.url()).unwrap());
    let config: postgres::Config = server.url().parse().unwrap();
    let open: Vec<_> = std::iter::from_fn(|| config.connect(NoTls).ok()).take(20).collect();
    let client = builder().auto_create_tables(false).connect(server.url()).unwrap();
    all_in_time("max_connections reached", &client, &["RateLimited", "53300"], false);
    drop(open);
    wait_until(support::LIMIT, "it works again", || client.lock("k").is_ok());
}

#[test]
fn a_row_that_a_stranger_holds() {
    let schema = support::schema();
    let client = connected(builder, &schema.url());
    let granted = granted(&client, "k");
    let mut stranger = schema.client();
    stranger.batch_execute("BEGIN; SELECT * FROM syncguard_locks FOR UPDATE").unwrap();
    fails_in_time("extend", || client.extend(&granted.lock_id, TTL), is_of_a_lock);
    fails_in_time("release", || client.release(&granted.lock_id), is_of_a_lock);
    // Contenders look without a lock: for them the key is simply held.
    let answer = wait_for(support::LIMIT, "an acquire is in time", || client.acquire("k", TTL).ok());
    assert!(answer.acquired().is_none());
}
