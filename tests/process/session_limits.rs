//! What a session is left with when a call's time is over, refused or cancelled: limits in the server
//! from the first call on, no transaction that somebody else has to end, no lock, no lost place.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::bouncer::Bouncer;
use crate::support::place::Place;
use crate::support::standby::signal_waits_for_a_standby;
use crate::support::{
    Action, LIMIT, Proxy, Role, Server, TTL, place, server, unique, wait_until, wait_until_app_waits,
};
use postgres::{Client, Config, NoTls};
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{AdvisoryKey, CancelToken, ErrorCode, LockBackend, PgLockClient};

type Pool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

#[derive(Debug)]
struct Begin(String);

impl r2d2::CustomizeConnection<Client, postgres::Error> for Begin {
    fn on_acquire(&self, client: &mut Client) -> Result<(), postgres::Error> {
        client.batch_execute(&self.0)
    }
}

fn callers_pool(config: Config, size: u32, statements: &str) -> Pool {
    r2d2::Pool::builder()
        .max_size(size)
        .min_idle(Some(0))
        .test_on_check_out(false)
        .connection_timeout(LIMIT)
        .connection_customizer(Box::new(Begin(statements.to_owned())))
        .build(PostgresConnectionManager::new(config, NoTls))
        .unwrap()
}

/// The number behind this text.
fn number_after(text: &str, what: &str) -> Option<u64> {
    let rest = text.split(what).nth(1)?;
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}

#[test]
fn set_up_waits_in_the_server_for_its_own_bound_and_no_longer() {
    const OPERATION: Duration = Duration::from_secs(5);
    let _alone = crate::support::alone();
    // A database of its own: the lock is one per database.
    let database = format!("db_{}", unique());
    let mut admin = server().client();
    admin.batch_execute(&format!("CREATE DATABASE {database}")).unwrap();
    let named = |url: &str, name: &str| {
        let mut config: Config = url.parse().unwrap();
        config.dbname(&database).application_name(name);
        config
    };
    let mut first = named(server().url(), "first").connect(NoTls).unwrap();
    first.batch_execute("SELECT pg_advisory_lock(1398363715, 1145326592)").unwrap();
    let over = [
        ("tcp", server().url(), false),
        ("socket", server().socket_url(), false),
        ("pool", server().url(), true),
    ];
    for (name, url, pool) in over {
        let app = format!("{name}_{}", unique());
        let config = named(url, &app);
        let call = thread::spawn(move || {
            let builder = PgLockClient::builder().operation_timeout(OPERATION);
            if pool {
                builder.build(callers_pool(config, 2, ""))
            } else {
                builder.connect_with(config, NoTls)
            }
        });
        let pid = wait_until_app_waits(&mut admin, &app);
        let query: String =
            admin.query_one("SELECT query FROM pg_stat_activity WHERE pid = $1", &[&pid]).unwrap().get(0);
        let limit = number_after(&query, "lock_timeout TO ").unwrap_or_else(|| panic!("{name}: {query}"));
        assert!(u128::from(limit) <= 6 * OPERATION.as_millis(), "{name}: {limit} ms");
        admin.execute("SELECT pg_cancel_backend($1)", &[&pid]).unwrap();
        let error = call.join().unwrap().unwrap_err();
        assert_eq!(error.sqlstate(), Some("57014"), "{name}: {error:?}");
    }
    drop(first);
    admin.batch_execute(&format!("DROP DATABASE {database} WITH (FORCE)")).unwrap();
}

#[test]
fn the_first_call_on_a_callers_pool_has_limits_in_the_server() {
    let _alone = crate::support::alone();
    let schema = crate::support::schema();
    let app = format!("first_{}", unique());
    let mut config = schema.config();
    config.application_name(&app);
    let pool = callers_pool(config, 2, "");
    let client = PgLockClient::builder().auto_create_tables(false).build(pool).unwrap();
    // There are no tables, so that to look for them is all that it does.
    assert_eq!(client.is_locked("k").unwrap_err().code(), ErrorCode::InvalidArgument);
    let sql = "SELECT query FROM pg_stat_activity WHERE application_name = $1";
    let last: String = schema.client().query_one(sql, &[&app]).unwrap().get(0);
    for limit in ["lock_timeout TO ", "statement_timeout TO "] {
        let limit = number_after(&last, limit).unwrap_or_else(|| panic!("{last}"));
        assert!((1..=5_050).contains(&limit), "{last}");
    }
}

/// The time is over while the second message is on its way: the session must not be ended meanwhile.
#[test]
fn a_call_with_a_token_whose_time_runs_out_is_not_ended_by_the_server() {
    let _alone = crate::support::alone();
    let server = Server::start(&crate::support::Config::new());
    let schema = server.schema();
    let proxy = Proxy::start(server.port());
    let url = proxy.url(&schema.url());
    PgLockClient::connect(&schema.url()).unwrap();
    for pool in [false, true] {
        let builder = PgLockClient::builder().auto_create_tables(false);
        let builder = builder.operation_timeout(Duration::from_millis(400));
        let client = if pool {
            builder.build(callers_pool(url.parse().unwrap(), 4, "")).unwrap()
        } else {
            builder.connect(&url).unwrap()
        };
        wait_until(LIMIT, "everything is prepared", || client.is_locked("k").is_ok());
        // Later than the call's own end, sooner than the session's.
        proxy.once(";COMMIT", Action::DelayQuery(Duration::from_millis(700)));
        let token = CancelToken::new();
        let key = format!("k{pool}");
        let outcome = LockBackend::acquire(&client, &key, TTL, &token);
        if let Err(error) = outcome {
            assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
        }
        proxy.pass_all();
        let mut admin = schema.client();
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";
        wait_until(LIMIT, "the transaction is over", || {
            admin.query_one(sql, &[]).unwrap().get::<_, i64>(0) == 0
        });
    }
    let log = server.log();
    assert!(!log.contains("idle-in-transaction timeout"), "{log}");
}

#[test]
fn a_refused_self_test_leaves_no_lock_behind() {
    let _alone = crate::support::alone();
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    let server = server();
    let mut admin = server.client();
    for (mode, size) in [("transaction", "1"), ("transaction", "4"), ("statement", "1"), ("statement", "4")] {
        let bouncer = Bouncer::start(&[("pool_mode", mode), ("default_pool_size", size)]);
        let config: Config = bouncer.url().parse().unwrap();
        let builder = || PgLockClient::builder().auto_create_tables(false);
        let theirs = Bouncer::start(&[
            ("pool_mode", mode),
            ("default_pool_size", size),
            ("ignore_startup_parameters", "extra_float_digits,options"),
        ]);
        let pool = callers_pool(theirs.url().parse().unwrap(), 4, "");
        for client in [builder().connect_with(config, NoTls).unwrap(), builder().build(pool).unwrap()] {
            let before: i64 = admin.query_one(locks, &[]).unwrap().get(0);
            for _ in 0..10 {
                let refused = client.try_advisory_lock(&AdvisoryKey::from_text("job")).unwrap_err();
                assert_eq!(refused.code(), ErrorCode::InvalidArgument, "{mode}: {refused:?}");
            }
            let after: i64 = admin.query_one(locks, &[]).unwrap().get(0);
            assert!(after <= before, "{mode}, {size}: {before}, then {after}");
        }
    }
}

/// Refuses sessions that begin with settings, as a proxy does.
struct Proud {
    port: u16,
    tried: Arc<AtomicUsize>,
}

impl Proud {
    fn start(state: &'static str, always: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let tried = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&tried);
        thread::spawn(move || {
            for mut client in listener.incoming().map_while(Result::ok) {
                count.fetch_add(1, Ordering::SeqCst);
                let mut length = [0; 4];
                client.read_exact(&mut length).unwrap();
                let mut startup = vec![0; u32::from_be_bytes(length) as usize - 4];
                client.read_exact(&mut startup).unwrap();
                if always || startup.windows(9).any(|text| text == b"\0options\0") {
                    let fields = format!("SFATAL\0VFATAL\0C{state}\0Mno settings here\0\0");
                    let mut answer = vec![b'E'];
                    answer.extend_from_slice(&u32::try_from(fields.len() + 4).unwrap().to_be_bytes());
                    answer.extend_from_slice(fields.as_bytes());
                    client.write_all(&answer).unwrap();
                    continue;
                }
                let mut server = TcpStream::connect(("127.0.0.1", server().port())).unwrap();
                server.write_all(&length).unwrap();
                server.write_all(&startup).unwrap();
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || std::io::copy(&mut from, &mut to));
                thread::spawn(move || std::io::copy(&mut server, &mut client));
            }
        });
        Self { port, tried }
    }

    fn url(&self) -> String {
        format!("user=postgres dbname=postgres host=127.0.0.1 port={} sslmode=disable", self.port)
    }
}

#[test]
fn a_proxy_that_refuses_the_settings_of_a_session_is_asked_once_without_whatever_its_sqlstate() {
    let _alone = crate::support::alone();
    let place = place();
    for state in ["08P01", "0A000", "08004", "22023", "42704", "28000", "XX000"] {
        let proxy = Proud::start(state, false);
        let client = PgLockClient::builder().schema(place.schema.name()).connect(&proxy.url());
        let client = client.unwrap_or_else(|error| panic!("{state}: {error:?}"));
        client.lock(&place.key(state)).unwrap().release().unwrap();
        assert_eq!(place.stored.row(&place.key(state)), None, "{state}");
    }
    // What is for certain something else is not tried twice, and what else is comes back as it is.
    for (state, tries, code) in [
        ("28P01", 1, ErrorCode::AuthFailed),
        ("53300", 1, ErrorCode::RateLimited),
        ("57P03", 1, ErrorCode::ServiceUnavailable),
        ("28000", 2, ErrorCode::AuthFailed),
    ] {
        let proxy = Proud::start(state, true);
        let error = PgLockClient::connect(&proxy.url()).unwrap_err();
        assert_eq!((error.code(), error.sqlstate()), (code, Some(state)), "{error:?}");
        assert_eq!(proxy.tried.load(Ordering::SeqCst), tries, "{state}");
    }
}

/// The current role has no right to end the session, the one that logged in has.
#[test]
fn a_connection_in_doubt_is_ended_whatever_its_current_role() {
    let _alone = crate::support::alone();
    let place = place();
    let role = Role::new(&place.schema);
    let app = format!("app_{}", unique());
    place.stored.run(&format!(
        "CREATE ROLE {app} NOLOGIN; GRANT {app} TO {}; GRANT USAGE ON SCHEMA {} TO {app}; \
         GRANT ALL ON ALL TABLES IN SCHEMA {} TO {app}",
        role.name(),
        place.schema.name(),
        place.schema.name()
    ));
    let mut config = role.config();
    let name = format!("doubt_{}", unique());
    config.application_name(&name);
    let pool = callers_pool(config, 1, &format!("SET ROLE {app}"));
    let client = PgLockClient::builder().auto_create_tables(false).build(pool).unwrap();
    client.is_locked("so that everything is prepared").unwrap();
    let mut other = place.schema.client();
    let mut transaction = other.transaction().unwrap();
    transaction.batch_execute("LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE").unwrap();
    let token = CancelToken::new();
    let key = place.key("a");
    let (theirs, asked, fired) = (client.clone(), key.clone(), token.clone());
    let call = thread::spawn(move || LockBackend::acquire(&theirs, &asked, TTL, &fired));
    wait_until_app_waits(&mut place.schema.client(), &name);
    token.cancel();
    assert_eq!(call.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
    transaction.rollback().unwrap();
    // The pool's only place is free again.
    assert!(client.acquire(&key, TTL).unwrap().acquired().is_some());
    drop(client);
    place.stored.run(&format!("DROP OWNED BY {app}; DROP ROLE {app}"));
}

/// The server answers success, with a warning, if somebody cancels its wait for a standby.
#[test]
fn a_session_that_would_hear_no_warnings_does_not_take_a_cancelled_wait_for_success() {
    let _alone = crate::support::alone();
    let server = Server::start(&crate::support::Config::new());
    let place = Place::new(server.schema());
    let role = Role::new(&place.schema);
    role.set(&place.schema, "client_min_messages", "error");
    let schema = place.schema.name();
    place.stored.run(&format!("GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {}", role.name()));
    let theirs = format!("-c search_path={schema} -c client_min_messages=error");
    let mut told = role.config();
    told.options(&theirs);
    for (n, config) in [role.config(), told].into_iter().enumerate() {
        let builder =
            PgLockClient::builder().auto_create_tables(false).operation_timeout(Duration::from_secs(3));
        let client = builder.connect_with(config, NoTls).unwrap();
        client.is_locked("so that everything is prepared").unwrap();
        server.configure("synchronous_standby_names", "nobody");
        let key = place.key(&format!("k{n}"));
        let result = signal_waits_for_a_standby(&mut server.client(), "pg_cancel_backend", || {
            client.acquire(&key, TTL)
        });
        // Before anything can fail: the schema is dropped then, and that would wait as well.
        server.configure("synchronous_standby_names", "");
        assert!(result.expect_err("no standby has it").is_outcome_unknown());
    }
}
