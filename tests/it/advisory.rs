//! Session locks on a real server: who gets them, how they end, what they leave behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use crate::support::calls::told_in_time;
use crate::support::session_locks::{
    builder, callers_pool, client, has_session_timer, holders, key, named, taken,
};
use crate::support::{LIMIT, server, unique, wait_until};
use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{
    AdvisoryGuard, AdvisoryKey, AdvisoryLost, AdvisoryOptions, CancelToken, DEFAULT_MAX_HOLD, ErrorCode,
    LockError, PgLockClient, ReleaseResult,
};

#[test]
fn one_of_two_clients_gets_a_key_and_the_other_after_it() {
    let (a, b, key) = (client(), client(), key());
    let guard = taken(&a, key);
    assert!(guard.is_held() && guard.lost_reason().is_none() && guard.key() == key);
    assert!(b.try_advisory_lock(&key).unwrap().is_none());
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    let guard = taken(&b, key);
    drop(guard);
    drop(taken(&a, key));
}

#[test]
fn one_client_does_not_get_a_key_twice_although_a_session_would() {
    let (client, key, other) = (client(), key(), key());
    let first = taken(&client, key);
    assert!(client.try_advisory_lock(&key).unwrap().is_none());
    let second = taken(&client, other);
    assert_ne!(first.pid(), second.pid(), "each guard has a session of its own");

    // What the guards are kept from: in one session the lock is counted.
    let mut raw = server().client();
    let number = AdvisoryKey::from_text(&unique()).as_i64().unwrap();
    let mut call = |sql: &str| -> bool { raw.query_one(sql, &[&number]).unwrap().get(0) };
    assert!(call("SELECT pg_try_advisory_lock($1)") && call("SELECT pg_try_advisory_lock($1)"));
    assert!(call("SELECT pg_advisory_unlock($1)"));
    assert!(client.try_advisory_lock(&AdvisoryKey::from_i64(number)).unwrap().is_none());
    assert!(call("SELECT pg_advisory_unlock($1)"));
    assert!(client.try_advisory_lock(&AdvisoryKey::from_i64(number)).unwrap().is_some());
    assert!(!call("SELECT pg_advisory_unlock($1)"), "what is not held is not unlocked");
}

#[test]
fn shared_holders_exclude_only_exclusive_ones() {
    let (client, key) = (client(), key());
    let shared = AdvisoryOptions::new().shared();
    let first = client.try_advisory_lock_with(&key, &shared).unwrap().unwrap();
    let second = client.try_advisory_lock_with(&key, &shared).unwrap().unwrap();
    assert!(client.try_advisory_lock(&key).unwrap().is_none());
    assert_eq!(first.release().unwrap(), ReleaseResult::Released);
    assert!(client.try_advisory_lock(&key).unwrap().is_none());
    drop(second);
    let exclusive = taken(&client, key);
    assert!(client.try_advisory_lock_with(&key, &shared).unwrap().is_none());
    drop(exclusive);
}

#[test]
fn every_number_and_every_pair_is_a_key() {
    let client = client();
    let numbers = [i64::MIN, i64::MAX, -1, -(1 << 40)].map(AdvisoryKey::from_i64);
    let pairs = [(i32::MIN, i32::MAX), (-1, -1)].map(|(a, b)| AdvisoryKey::from_pair(a, b));
    for key in numbers.into_iter().chain(pairs) {
        let guard = client.advisory_lock(&key).unwrap();
        let shown = client.advisory_holders().unwrap();
        assert!(shown.iter().any(|holder| holder.key == key && holder.pid == guard.pid()), "{key}");
        assert_eq!(guard.release().unwrap(), ReleaseResult::Released, "{key}");
    }
}

#[test]
fn a_connection_goes_back_unlocked_and_as_it_was() {
    let pool = callers_pool(server().url(), 1);
    let (pid, timer) = {
        let mut connection = pool.get().unwrap();
        let timer = has_session_timer(&mut connection).then(|| "77s".to_owned());
        if timer.is_some() {
            connection.batch_execute("SET idle_session_timeout = '77s'").unwrap();
        }
        (connection.query_one("SELECT pg_backend_pid()", &[]).unwrap().get::<_, i32>(0), timer)
    };
    let client = builder().build(pool.clone()).unwrap();
    let elsewhere = named(&unique(), 1);
    let pair = || AdvisoryKey::namespaced(&unique(), "k").unwrap();
    for (key, how) in [(key(), "released"), (key(), "dropped"), (key(), "refused")]
        .into_iter()
        .chain(["released", "dropped", "refused"].map(|how| (pair(), how)))
    {
        let theirs = (how == "refused").then(|| taken(&elsewhere, key));
        let guard = client.try_advisory_lock(&key).unwrap();
        assert_eq!(
            guard.as_ref().map(AdvisoryGuard::pid),
            theirs.is_none().then_some(pid),
            "the one connection"
        );
        match guard {
            Some(guard) if how == "released" => {
                assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
            }
            other => drop(other),
        }
        let mut connection = pool.get().unwrap();
        let row = connection
            .query_one("SELECT pg_backend_pid(), current_setting('idle_session_timeout', true), (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')", &[])
            .unwrap();
        assert_eq!((row.get(0), row.get(1), row.get(2)), (pid, timer.clone(), 0_i64), "{how}");
    }
}

#[test]
fn a_callers_pool_may_age_its_connections_faster_than_a_lock_is_held() {
    let name = unique();
    let mut config: postgres::Config = server().url().parse().unwrap();
    config.application_name(&name);
    let pool = r2d2::Pool::builder()
        .max_size(3)
        .min_idle(Some(0))
        .max_lifetime(Some(Duration::from_millis(50)))
        .idle_timeout(Some(Duration::from_millis(50)))
        .build(PostgresConnectionManager::new(config, NoTls))
        .unwrap();
    let client = builder().build(pool.clone()).unwrap();
    let key = key();
    let guard =
        client.try_advisory_lock_with(&key, &AdvisoryOptions::new().max_hold(LIMIT * 2)).unwrap().unwrap();
    drop((pool.get().unwrap(), pool.get().unwrap()));
    // r2d2 does so every 30 s.
    wait_until(LIMIT, "the pool closes what is idle", || pool.state().connections == 1);
    assert!(guard.is_held());
    let mut observer = server().client();
    assert_eq!(holders(&mut observer, key), 1);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    assert_eq!(holders(&mut observer, key), 0);
}

#[test]
fn no_transaction_is_open_while_a_lock_is_held() {
    let (client, mut observer) = (client(), server().client());
    let guard = taken(&client, key());
    let mut look = || -> (String, bool, std::time::SystemTime) {
        let sql = "SELECT state, xact_start IS NULL AND backend_xmin IS NULL, state_change FROM pg_stat_activity WHERE pid = $1";
        let row = observer.query_one(sql, &[&guard.pid()]).unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    let first = look();
    assert_eq!((first.0.as_str(), first.1), ("idle", true));
    // Also after the monitor has asked.
    let mut last = first.clone();
    wait_until(LIMIT, "the session is asked", || {
        last = look();
        last.2 != first.2 && last.0 == "idle"
    });
    assert!(last.1 && guard.is_held());
}

#[test]
fn a_lock_is_released_on_every_way_out() {
    let (client, mut observer) = (client(), server().client());
    let key = key();
    let work = |outcome: Result<u32, String>| {
        let _guard = taken(&client, key);
        outcome
    };
    assert_eq!(work(Ok(1)), Ok(1));
    assert_eq!(holders(&mut observer, key), 0);
    assert_eq!(work(Err("mine".into())), Err("mine".into()));
    assert_eq!(holders(&mut observer, key), 0);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        let _guard = taken(&client, key);
        panic!("on purpose");
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
    wait_until(LIMIT, "the lock is free", || holders(&mut observer, key) == 0);
}

#[test]
fn a_guard_may_be_dropped_inside_an_async_runtime() {
    let (client, mut observer, key) = (client(), server().client(), key());
    let guard = taken(&client, key);
    let late = taken(&client, AdvisoryKey::from_text(&unique()));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let error = runtime.block_on(async move {
        drop(guard);
        late.release().unwrap_err()
    });
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    runtime.block_on(async move { drop(client) });
    wait_until(LIMIT, "the lock is free", || holders(&mut observer, key) == 0);
}

#[test]
fn a_guard_outlives_its_client() {
    let (client, mut observer, key) = (client(), server().client(), key());
    let guard = taken(&client, key);
    drop(client);
    assert!(guard.is_held() && holders(&mut observer, key) == 1);
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    assert_eq!(holders(&mut observer, key), 0);
}

#[test]
fn a_lock_is_released_at_its_deadline() {
    assert_eq!(DEFAULT_MAX_HOLD, Duration::from_secs(30));
    let logs = crate::support::logs::capture();
    let text = format!("Somebody{}@example.com", unique());
    let key = AdvisoryKey::from_text(&text);
    let (a, b) = (client(), client());
    let options = AdvisoryOptions::new().max_hold(Duration::from_millis(150));
    let guard = a.try_advisory_lock_with(&key, &options).unwrap().unwrap();
    assert!(!guard.overdue().is_cancelled());
    assert!(guard.lost().wait_timeout(LIMIT), "fires without anybody asking");
    assert!(!guard.is_held() && guard.overdue().is_cancelled());
    assert_eq!(guard.lost_reason(), Some(AdvisoryLost::Deadline));
    drop(b.advisory_lock(&key).unwrap());
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    let number = key.to_string();
    let told = logs.lines().into_iter().filter(|line| line.text.contains(&number)).count();
    assert_eq!(told, 1, "one line, with the number");
    logs.assert_without(&[&text, &text.to_lowercase()]);
}

#[test]
fn a_lock_that_is_shorter_than_any_sleep_still_ends_in_time() {
    // The monitor sleeps while another lock is held; a shorter one must wake it.
    let client = client();
    let long = taken(&client, key());
    for _ in 0..5 {
        let options = AdvisoryOptions::new().max_hold(Duration::from_millis(200));
        let short = client.try_advisory_lock_with(&key(), &options).unwrap().unwrap();
        assert!(short.lost().wait_timeout(LIMIT));
    }
    assert!(long.is_held());
}

#[test]
fn a_lock_may_be_kept_past_its_time() {
    let (a, b, key) = (client(), client(), key());
    let options = AdvisoryOptions::new().max_hold(Duration::from_millis(100)).keep_past_deadline();
    let guard = a.try_advisory_lock_with(&key, &options).unwrap().unwrap();
    assert!(guard.overdue().wait_timeout(LIMIT), "the work is asked to finish");
    assert!(guard.is_held() && !guard.lost().is_cancelled());
    // Longer than the server's grace.
    let patient = AdvisoryOptions::new().timeout(Duration::from_millis(1500));
    assert_eq!(b.advisory_lock_with(&key, &patient).unwrap_err().code(), ErrorCode::AcquisitionTimeout);
    assert!(guard.is_held());
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released);
    drop(taken(&b, key));
}

#[test]
fn the_operation_timeout_does_not_limit_how_long_a_lock_is_held() {
    let client = builder().operation_timeout(Duration::from_millis(200)).connect(server().url()).unwrap();
    let options = AdvisoryOptions::new().max_hold(Duration::from_millis(1500)).keep_past_deadline();
    let mut guard = None;
    wait_until(LIMIT, "a try is fast enough", || {
        guard = client.try_advisory_lock_with(&key(), &options).ok().flatten();
        guard.is_some()
    });
    let guard = guard.unwrap();
    assert!(guard.overdue().wait_timeout(LIMIT));
    assert!(guard.is_held());
}

#[test]
fn an_ended_session_is_noticed_and_not_replaced() {
    let (a, b, key, mut observer) = (client(), client(), key(), server().client());
    let guard = taken(&a, key);
    observer.execute("SELECT pg_terminate_backend($1)", &[&guard.pid()]).unwrap();
    assert!(guard.lost().wait_timeout(LIMIT));
    assert!(!guard.is_held() && guard.lost_reason() == Some(AdvisoryLost::Connection));
    let next = b.advisory_lock(&key).unwrap();
    assert!(!guard.is_held(), "once lost, lost for good");
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
    assert!(next.is_held());
}

#[test]
fn holders_and_waiters_are_shown_and_a_holder_can_be_ended() {
    let name = unique();
    let (client, operator) = (named(&name, 4), client());
    let key = AdvisoryKey::from_text(&name);
    let guard = taken(&client, key);
    let shown = operator.advisory_holders().unwrap();
    let shown: Vec<_> = shown.iter().filter(|holder| holder.key == key).collect();
    let [holder] = shown[..] else { panic!("one holder, found {shown:?}") };
    assert_eq!((holder.pid, holder.application_name.as_deref()), (guard.pid(), Some(name.as_str())));
    assert!(!holder.shared && holder.state.as_deref() == Some("idle"));
    assert!(holder.since_ms >= holder.connected_since_ms && holder.connected_since_ms.is_some());

    // A program that waits in the server.
    let number = key.as_i64().unwrap();
    let waiter = thread::spawn(move || {
        let mut raw = server().client();
        raw.execute("SELECT pg_advisory_lock_shared($1)", &[&number]).unwrap();
    });
    let mut waiting = Vec::new();
    wait_until(LIMIT, "the waiter is shown", || {
        waiting = operator.advisory_waiters().unwrap();
        waiting.retain(|waiter| waiter.key == key);
        !waiting.is_empty()
    });
    assert!(waiting[0].shared && waiting[0].since_ms.is_some());

    // The documented query says the same.
    let page = std::fs::read_to_string("docs/advisory-locks.md").unwrap();
    let (_, rest) = page.split_once("<!-- query: holders -->\n\n```sql\n").unwrap();
    let (sql, _) = rest.split_once("```").unwrap();
    let rows = server().client().query(sql, &[]).unwrap();
    let found = rows.iter().any(|row| {
        row.get::<_, i64>("key") == number
            && row.get::<_, i32>("pid") == guard.pid()
            && row.get::<_, bool>("granted")
            && row.get::<_, &str>("mode") == "ExclusiveLock"
    });
    assert!(found);

    assert!(operator.terminate_advisory_session(guard.pid()).unwrap());
    waiter.join().unwrap();
    assert!(guard.lost().wait_timeout(LIMIT));
    let bystander = server().client().query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    assert!(!operator.terminate_advisory_session(bystander).unwrap(), "only sessions with such locks");
}

#[test]
fn the_right_to_end_a_session_is_asked_for() {
    let role = format!("r{}", unique());
    let mut admin = server().client();
    admin.batch_execute(&format!("CREATE ROLE {role} LOGIN")).unwrap();
    let mut config: postgres::Config = server().url().parse().unwrap();
    config.user(&role);
    let weak = builder().connect_with(config, NoTls).unwrap();
    let strong = client();
    let guard = taken(&strong, key());
    let error = weak.terminate_advisory_session(guard.pid()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::AuthFailed);
    assert!(error.to_string().contains("pg_signal_backend"), "{error}");
    assert!(guard.is_held());
    drop(weak);
    admin.batch_execute(&format!("DROP ROLE {role}")).unwrap();
}

#[test]
fn closing_the_client_ends_its_locks_and_its_waits() {
    let (client, key, mut observer) = (client(), key(), server().client());
    let guard = taken(&client, key);
    let report = thread::scope(|scope| {
        let waiter = scope.spawn(|| client.advisory_lock_with(&key, &AdvisoryOptions::new().wait_forever()));
        let report = client.close(LIMIT).unwrap();
        assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        report
    });
    assert!(report.is_clean());
    assert!(guard.lost().is_cancelled() && guard.lost_reason() == Some(AdvisoryLost::Closed));
    assert_eq!(holders(&mut observer, key), 0);
    assert_eq!(client.try_advisory_lock(&key).unwrap_err().code(), ErrorCode::Aborted);
    assert_eq!(guard.release().unwrap(), ReleaseResult::NotHeld);
}

#[test]
fn an_acquire_of_a_lease_names_the_session_lock_that_it_meets() {
    let schema = crate::support::schema();
    let patient = PgLockClient::connect(&schema.url()).unwrap();
    let hasty = PgLockClient::builder().operation_timeout(Duration::from_millis(300));
    let hasty = hasty.auto_create_tables(false).connect(&schema.url()).unwrap();
    let name = unique();
    let number: i64 = server().client().query_one("SELECT hashtext($1)::int8", &[&name]).unwrap().get(0);
    let guard = taken(&client(), AdvisoryKey::from_i64(number));
    let pid = guard.pid().to_string();
    for client in [hasty.clone(), hasty.cancellable(&CancelToken::new())] {
        let named = |error: &LockError| error.to_string().contains(&pid);
        let error = told_in_time(&client, named, || client.acquire(&name, Duration::from_secs(5)));
        assert_eq!(error.code(), ErrorCode::NetworkTimeout);
        assert!(error.is_contention(), "a waiting lock tries again");
    }
    drop(guard);
    drop(patient.lock(&name).unwrap());
}

#[test]
fn a_key_that_is_on_a_callers_connection_already_is_not_free() {
    // A session may take a lock twice: what other code left on it must not let anybody in.
    let pool = callers_pool(server().url(), 1);
    let client = builder().build(pool.clone()).unwrap();
    let (key, other) = (key(), key());
    let (number, mut observer) = (key.as_i64().unwrap(), server().client());
    let left = |sql: &str| pool.get().unwrap().execute(sql, &[&number]).unwrap();
    for (take, give) in [
        ("SELECT pg_advisory_lock($1)", "SELECT pg_advisory_unlock($1)"),
        ("SELECT pg_advisory_lock_shared($1)", "SELECT pg_advisory_unlock_shared($1)"),
    ] {
        left(take);
        assert!(client.try_advisory_lock(&key).unwrap().is_none());
        assert!(client.try_advisory_lock_with(&key, &AdvisoryOptions::new().shared()).unwrap().is_none());
        // Another key is, and what was left stays.
        assert_eq!(taken(&client, other).release().unwrap(), ReleaseResult::Released);
        assert_eq!(holders(&mut observer, key), 1);
        left(give);
        assert_eq!(taken(&client, key).release().unwrap(), ReleaseResult::Released);
        assert_eq!(holders(&mut observer, key), 0);
    }
}
