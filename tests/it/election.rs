//! Leader election on a real server: handovers, crashes, restarts, lost answers, fenced terms.

use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::support::calls::{ms, renewing_often};
use crate::support::leases::{self, client, counter, delete_row, expiry, named, row, wait_until_released};
use crate::support::wait::Bounded;
use crate::support::worker::{self, Worker};
use crate::support::{Action, Config, LIMIT, Network, Proxy, Server, Stop, logs, together, wait_until};
use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{CancelToken, ErrorCode, LockOptions, LostReason, PgLockClient, Term};

const KEY: &str = "scheduler";

/// A closure for campaigns that must not be won.
fn nobody_leads(_: &Term) -> ControlFlow<()> {
    panic!("nobody can lead")
}

#[test]
fn candidates_of_every_kind_lead_one_after_the_other() {
    const TERMS: usize = 5;
    let _bounded = Bounded::start();
    let schema = crate::support::schema();
    let pool = r2d2::Pool::builder()
        .max_size(4)
        .build(PostgresConnectionManager::new(schema.config(), NoTls))
        .unwrap();
    let clients = [
        client(&schema),
        client(&schema).cancellable(&CancelToken::new()),
        PgLockClient::builder().build(pool).unwrap(),
        leases::connect(PgLockClient::builder(), &schema.socket_url()),
    ];
    let (leaders, terms) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    together(clients.len(), |n| {
        let client = &clients[n];
        let mut led = 0;
        let led = client.elect(KEY, &LockOptions::new().retry_delay(ms(10)), |term| {
            assert_eq!(leaders.fetch_add(1, Ordering::SeqCst), 0, "one leader at a time");
            let leader = client.leader(KEY).unwrap().expect("we lead");
            assert_eq!(leader.term, term.number());
            assert!(leader.since_ms < leader.expires_at_ms && term.is_held());
            terms.lock().unwrap().push(term.number().get());
            led += 1;
            leaders.fetch_sub(1, Ordering::SeqCst);
            if led == TERMS { Break(led) } else { Continue(()) }
        });
        assert_eq!(led.unwrap(), TERMS);
    });
    let expected: Vec<u64> = (1..=(clients.len() * TERMS) as u64).collect();
    assert_eq!(terms.into_inner().unwrap(), expected, "every grant is a term, and none is led twice");
    assert_eq!(clients[0].leader(KEY).unwrap(), None);
    assert!(row(&mut schema.client(), KEY).is_none());
}

#[test]
fn a_leader_that_is_killed_is_followed_after_its_ttl_and_a_second_and_not_before() {
    let _bounded = Bounded::start();
    worker::part("leader", |parent| {
        let client = PgLockClient::connect(&parent.arg("url")).unwrap();
        let options = LockOptions::new().ttl(ms(1500)).heartbeat(syncguard::Heartbeat::Every(ms(200)));
        let _ = client.elect::<()>(KEY, &options, |term| {
            parent.say(&format!("term {}", term.number()));
            parent.wait_forever()
        });
    });
    let schema = crate::support::schema();
    let client = client(&schema);
    let mut observer = schema.client();
    let test = "a_leader_that_is_killed_is_followed_after_its_ttl_and_a_second_and_not_before";
    let mut leader = Worker::start(test, "leader", &[("url", &schema.url())]);
    leader.expect("term 000000000000001");
    thread::scope(|scope| {
        let follower = scope.spawn(|| {
            client.elect(KEY, &LockOptions::new(), |term| {
                Break((term.number().get(), client.leader(KEY).unwrap().expect("we lead").since_ms))
            })
        });
        // Read while it lives, so that it is its own lease's; a later renewal only ends later.
        let end = expiry(&mut observer, KEY);
        leader.kill();
        let (term, since_ms) = follower.join().unwrap().unwrap();
        assert_eq!(term, 2);
        assert!(since_ms >= end + 1000, "it led {} ms after the old lease's end", since_ms - end);
    });
}

#[test]
fn a_leader_comes_back_by_itself_after_the_server_was_restarted() {
    let _bounded = Bounded::start();
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let key = format!("scheduler-{}", crate::support::unique());
    let client = leases::connect(PgLockClient::builder().dispose_timeout(ms(200)), &schema.url());
    let log = logs::capture();
    let options = LockOptions::new().ttl(ms(1500)).heartbeat(syncguard::Heartbeat::Every(ms(200)));
    let (tell, terms) = mpsc::channel();
    thread::scope(|scope| {
        let leading = scope.spawn(|| {
            let mut before = None;
            client.elect(&key, &options, |term| {
                tell.send(term.number()).unwrap();
                if let Some(before) = before {
                    return Break(before);
                }
                assert!(term.lost().wait_timeout(LIMIT) && !term.is_held());
                before = Some(term.number());
                tell.send(term.number()).unwrap();
                Continue(())
            })
        });
        let first = terms.recv_timeout(LIMIT).unwrap();
        server.stop(Stop::Fast);
        assert_eq!(terms.recv_timeout(LIMIT).unwrap(), first, "it knows that it leads no more");
        let hash = syncguard::hash_key(&key);
        let told = || {
            let lines = log.at_least(log::Level::Warn).into_iter();
            lines.filter(|line| line.text.contains(&hash) && line.text.contains("election")).count()
        };
        wait_until(LIMIT, "the log hears that it waits", || told() == 1);
        server.start_again();
        assert!(terms.recv_timeout(LIMIT).unwrap() > first, "a term of its own");
        assert_eq!(leading.join().unwrap().unwrap(), first);
        assert_eq!(told(), 1, "once");
    });
}

#[test]
fn what_the_program_has_to_mend_ends_the_campaign_and_bad_input_is_never_sent() {
    let _bounded = Bounded::start();
    let schema = crate::support::schema();
    let builder = || PgLockClient::builder().auto_create_tables(false);
    let without_tables = leases::connect(builder(), &schema.url());
    let error = without_tables.elect(KEY, &LockOptions::new(), nobody_leads).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "there are no tables: {error:?}");

    // Nobody listens there: whatever is sent fails in another way.
    let away = leases::connect(builder(), "postgresql://postgres@127.0.0.1:1/postgres");
    for (key, options) in [
        ("", LockOptions::new()),
        (KEY, LockOptions::new().ttl(Duration::ZERO)),
        (KEY, LockOptions::new().heartbeat(syncguard::Heartbeat::Every(Duration::ZERO))),
    ] {
        let error = away.elect(key, &options, nobody_leads).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
    }
    assert_eq!(away.leader("").unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(away.leader(KEY).unwrap_err().code(), ErrorCode::ServiceUnavailable, "one read, one answer");

    let token = CancelToken::new();
    thread::scope(|scope| {
        let options = LockOptions::new().retry_delay(Duration::from_secs(3600)).cancel(&token);
        let away = &away;
        let leading = leases::spawn_until_asleep(scope, move || away.elect(KEY, &options, nobody_leads));
        assert!(!leading.is_finished(), "a server that is away is waited for");
        token.cancel();
        assert_eq!(leading.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    });
}

#[test]
fn lost_answers_make_no_second_leader_and_leave_no_lease() {
    let _bounded = Bounded::start();
    for lost in [1, 6] {
        let schema = crate::support::schema();
        let mut observer = schema.client();
        let proxy = Proxy::start(crate::support::server().port());
        let client = leases::connect(PgLockClient::builder(), &proxy.url(&schema.url()));
        // The table of counters is there, and the statements are known.
        client.try_lock(KEY).unwrap().expect("the key is free").release().unwrap();
        let mut left = lost;
        proxy.on_query(move |sql| {
            let acquires = sql.contains("sg_acquire") && left > 0;
            left -= i32::from(acquires);
            if acquires { Action::CutAnswerAt(0) } else { Action::Pass }
        });
        let term = client.elect(KEY, &LockOptions::new().ttl(ms(5000)), |term| {
            let row = row(&mut observer, KEY).expect("we lead");
            assert_eq!(row.fence, term.number().to_string(), "{lost}");
            assert_eq!(counter(&mut observer, KEY), i64::try_from(term.number().get()).ok());
            // The answer to the resignation is lost, too.
            proxy.once("sg_release", Action::CutAnswerAt(0));
            Break(term.number().get())
        });
        let term = term.unwrap();
        if lost == 1 {
            assert_eq!(term, 2, "the grant was asked for again under its own id");
        }
        wait_until_released(&mut observer, KEY);
        let next = client.elect(KEY, &LockOptions::new(), |term| Break(term.number().get())).unwrap();
        assert_eq!(next, term + 1, "nothing was granted between");
    }
}

#[test]
fn a_lost_session_ends_no_term_and_a_lost_term_is_not_led_on() {
    let _bounded = Bounded::start();
    let schema = crate::support::schema();
    let mut observer = schema.client();
    let app = format!("leader-{}", crate::support::unique());
    let client = leases::connect(PgLockClient::builder(), &named(&schema.url(), &app));
    let end_sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
    let mut first = None;
    let second = client.elect(KEY, &renewing_often(), |term| {
        if first.is_some() {
            return Break(term.number());
        }
        first = Some(term.number());
        observer.query(end_sessions, &[&app]).unwrap();
        let before = expiry(&mut observer, KEY);
        wait_until(LIMIT, "it is renewed on another connection", || expiry(&mut observer, KEY) > before);
        assert!(term.is_held(), "the lease is the term, not the session");
        // An operator takes the key away: the term is over, although nobody else leads.
        delete_row(&mut observer, KEY);
        assert!(term.lost().wait_timeout(LIMIT) && !term.is_held());
        assert_eq!(term.lost_reason(), Some(LostReason::RowMissing));
        Continue(())
    });
    assert_eq!((first.map(syncguard::Fence::get), second.unwrap().get()), (Some(1), 2));
}

#[test]
fn a_transaction_of_an_old_term_cannot_commit() {
    let _bounded = Bounded::start();
    let schema = crate::support::schema();
    let (client, other) = (client(&schema), client(&schema));
    let mut database = schema.client();
    database.batch_execute("CREATE TABLE job (term bigint)").unwrap();
    // Renewals are too rare to notice what happens: what stops the leader is the check alone.
    let options = LockOptions::new().ttl(Duration::from_secs(600));
    let write = |term: &Term, database: &mut postgres::Client| {
        let mut transaction = database.transaction().unwrap();
        term.fence_transaction(&mut transaction)?;
        let number = i64::try_from(term.number().get()).unwrap();
        transaction.execute("INSERT INTO job VALUES ($1)", &[&number]).unwrap();
        transaction.commit().unwrap();
        Ok::<_, syncguard::LockError>(())
    };
    let error = client.elect(KEY, &options, |term| {
        write(term, &mut database).unwrap();
        other.operator().break_lock(KEY, "a test").unwrap();
        other.elect(KEY, &options, |newer| Break(write(newer, &mut schema.client()))).unwrap().unwrap();
        assert!(term.is_held(), "it knows of nothing");
        Break(write(term, &mut database).unwrap_err())
    });
    assert_eq!(error.unwrap().code(), ErrorCode::Aborted);
    let terms: Vec<i64> = database
        .query("SELECT term FROM job ORDER BY 1", &[])
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    // Breaking a lock raises the counter, too.
    assert_eq!(terms, [1, 3]);
}

#[test]
fn a_leader_that_is_cut_off_is_none_any_more_when_another_one_leads() {
    let _bounded = Bounded::start();
    let schema = crate::support::schema();
    let proxy = Proxy::start(crate::support::server().port());
    let builder = PgLockClient::builder().operation_timeout(ms(500)).dispose_timeout(ms(100));
    let cut_off = leases::connect(builder, &proxy.url(&schema.url()));
    let follower = client(&schema);
    let options = LockOptions::new().ttl(ms(1500)).heartbeat(syncguard::Heartbeat::Every(ms(200)));
    let led = cut_off.elect(KEY, &options, |term| {
        proxy.network(Network::Mute);
        let next = follower.elect(KEY, &options, |newer| {
            assert!(newer.number() > term.number());
            Break((term.is_held(), term.lost_reason()))
        });
        assert!(term.lost().wait_timeout(LIMIT));
        Break(next.unwrap())
    });
    assert_eq!(led.unwrap(), (false, Some(LostReason::Unreachable)));
    proxy.network(Network::Open);
}
