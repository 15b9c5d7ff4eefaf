//! Keys, lock ids and passwords stay out of log lines, texts of errors, and `Debug`, whatever happens.
//!
//! The driver has a log of its own: `tokio_postgres` writes the text of statements at debug level,
//! with the values in it. A program that must not log keys keeps that target at info.

use std::error::Error;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::thread;

use crate::support::calls::{ms, renewing_often};
use crate::support::leases::{self, connect, delete_row, forge, row, set_counter, wait_until_released};
use crate::support::{Config, LIMIT, Server, Stop, TTL, logs, wait_until, wait_until_app_waits};
use syncguard::{
    CancelToken, ErrorCode, FENCE_MAX, FENCE_WARN, LockError, Lookup, PgLockClient, ReleaseResult,
};

/// In every key, in forged lock ids, and in the password.
const MARK: &str = "MARKER";
const PASSWORD: &str = "MARKERpassword";
const ID: &str = "MARKERlockid0123456789";

/// Everything that was shown to somebody.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<String>>>);

impl Shown {
    fn text(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }
    fn debug(&self, value: &impl Debug) {
        self.text(format!("{value:?}"));
        self.text(format!("{value:#?}"));
    }
    /// An error as people print it: itself and its causes, in both ways.
    fn error(&self, error: &(dyn Error + 'static)) {
        let mut next = Some(error);
        while let Some(cause) = next {
            self.text(cause.to_string());
            self.text(format!("{cause:?}"));
            self.text(format!("{cause:#?}"));
            next = cause.source();
        }
    }
    /// Checks that it failed in the way that was meant, and keeps the texts.
    #[track_caller]
    fn failed<T: Debug>(&self, code: ErrorCode, result: Result<T, LockError>) {
        let error = result.expect_err("this was made to fail");
        assert_eq!(error.code(), code, "{error:?}");
        self.error(&error);
    }
    /// The lock ids that were seen count as secrets, too.
    #[track_caller]
    fn assert_without(&self, secrets: &[String]) {
        for text in self.0.lock().unwrap().iter() {
            for secret in secrets {
                assert!(!text.contains(secret.as_str()), "{secret} is in: {text}");
            }
        }
    }
}

/// The server's URL with a password, which a server that trusts everybody does not look at.
fn with_password(url: &str) -> String {
    url.replace("postgres@", &format!("postgres:{PASSWORD}@"))
}

#[test]
#[expect(clippy::too_many_lines, reason = "one captured run through everything there is")]
fn no_key_no_lock_id_and_no_password_is_shown_or_logged() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let schema = server.schema();
    let url = with_password(&schema.url());
    let mark = logs::exclusive();
    let shown = Shown::default();
    let mut ids = vec![MARK.to_owned()];
    let told = shown.clone();
    let builder = || {
        let (shown, told) = (shown.clone(), told.clone());
        let raw = syncguard::TelemetryOptions::new(move |event| shown.debug(event)).include_raw(true);
        let builder = PgLockClient::builder().operation_timeout(ms(2000)).dispose_timeout(ms(200));
        builder.telemetry(raw).on_release_error(move |error, context| {
            told.error(error);
            told.debug(context);
        })
    };
    shown.debug(&builder());
    let client = connect(builder(), &leases::named(&url, "MARKER-app"));
    let mut observer = schema.client();

    // What succeeds.
    let grant = client.acquire("MARKER-manual", TTL).unwrap();
    shown.debug(&grant);
    let grant = grant.acquired().unwrap();
    ids.push(grant.lock_id.clone());
    shown.debug(&grant);
    shown.debug(&client.acquire("MARKER-manual", TTL).unwrap());
    shown.debug(&client.extend(&grant.lock_id, TTL).unwrap());
    shown.debug(&client.is_locked("MARKER-manual").unwrap());
    shown.debug(&client.get_by_key("MARKER-manual").unwrap());
    shown.debug(&client.get_by_id(&grant.lock_id).unwrap());
    shown.debug(&client.get_by_key_raw("MARKER-manual").unwrap());
    shown.debug(&[Lookup::Key("MARKER-manual"), Lookup::LockId(&grant.lock_id)]);
    shown.debug(&client.operator().holders(10).unwrap());
    shown.debug(&client.operator().blocked("MARKER-manual").unwrap());
    shown.debug(&client.operator().break_lock("MARKER-manual", "an operator").unwrap());
    shown.debug(&client.release(&grant.lock_id).unwrap());
    let options = renewing_often().cancel(&CancelToken::new()).on_lost(|_| ());
    shown.debug(&options);
    shown.debug(&client);
    shown.debug(client.locks());
    let guard = client.lock_with("MARKER-guard", &options).unwrap();
    ids.push(guard.lock_id().to_owned());
    shown.debug(&guard);
    shown.debug(&guard.release().unwrap());
    client.with_lock("MARKER-helped", &renewing_often(), |guard| shown.debug(guard)).unwrap();

    // What is refused before it is sent.
    let long = MARK.repeat(100);
    shown.failed(ErrorCode::InvalidArgument, client.acquire(&long, TTL));
    shown.failed(ErrorCode::InvalidArgument, client.lock("MARKER\0"));
    shown.failed(ErrorCode::InvalidArgument, client.release("MARKER-of-another-length"));
    shown.failed(ErrorCode::InvalidArgument, client.get_by_id("MARKER lock id with sp"));
    for url in
        [format!("postgresql://u:{PASSWORD}@host:port/db"), format!("password={PASSWORD} port=x host=y")]
    {
        shown.failed(ErrorCode::InvalidArgument, PgLockClient::connect(&url));
    }
    shown.failed(
        ErrorCode::InvalidArgument,
        PgLockClient::builder().connect(&format!("user=u password={PASSWORD}")),
    );

    // Contention, timeouts, tokens.
    forge(&mut observer, "MARKER-taken", ID, 3_600_000);
    shown.failed(
        ErrorCode::AcquisitionTimeout,
        client.lock_with("MARKER-taken", &renewing_often().timeout(ms(2000))),
    );
    let fired = CancelToken::new();
    fired.cancel();
    shown.failed(ErrorCode::Aborted, client.cancellable(&fired).release(ID));
    shown.failed(ErrorCode::Aborted, client.lock_with("MARKER-taken", &renewing_often().cancel(&fired)));

    // Leases that are lost, and releases that fail.
    let lost = client.lock_with("MARKER-lost", &renewing_often()).unwrap();
    delete_row(&mut observer, "MARKER-lost");
    assert!(lost.lost().wait_timeout(LIMIT));
    shown.debug(&lost);
    shown.text(lost.lost_reason().unwrap().to_string());
    let taken = client.lock_with("MARKER-over", &renewing_often()).unwrap();
    forge(&mut observer, "MARKER-over", "MARKERlockid9876543210", 60_000);
    assert!(taken.lost().wait_timeout(LIMIT));
    shown.debug(&taken.lost_reason());
    let stuck = client.lock("MARKER-stuck").unwrap();
    ids.push(stuck.lock_id().to_owned());
    let mut other = schema.client();
    other
        .batch_execute("BEGIN; SELECT 1 FROM syncguard_locks WHERE key = 'MARKER-stuck' FOR UPDATE")
        .unwrap();
    drop(stuck);
    shown.failed(
        ErrorCode::NetworkTimeout,
        client.release(&ids[2]).and_then(|_| client.release(ids.last().unwrap())),
    );
    other.batch_execute("ROLLBACK").unwrap();
    wait_until_released(&mut observer, "MARKER-stuck");
    // The same without a handler: the library's own warning.
    let silent = connect(PgLockClient::builder().dispose_timeout(ms(150)), &url);
    let stuck = silent.lock("MARKER-stuck").unwrap();
    ids.push(stuck.lock_id().to_owned());
    other
        .batch_execute("BEGIN; SELECT 1 FROM syncguard_locks WHERE key = 'MARKER-stuck' FOR UPDATE")
        .unwrap();
    drop(stuck);
    other.batch_execute("ROLLBACK").unwrap();
    wait_until_released(&mut observer, "MARKER-stuck");

    // What the server refuses: its own texts repeat values.
    observer
        .batch_execute("ALTER TABLE syncguard_locks ADD CONSTRAINT no CHECK (key NOT LIKE '%refused%')")
        .unwrap();
    shown.failed(ErrorCode::InvalidArgument, client.acquire("MARKER-refused", TTL));
    shown.failed(ErrorCode::InvalidArgument, client.lock("MARKER-refused"));
    observer
        .batch_execute(
            "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF NEW.key LIKE '%told%' THEN RAISE '% of % is told', NEW.key, NEW.lock_id USING DETAIL = NEW.key; END IF; \
               RETURN NEW; END $$",
        )
        .unwrap();
    observer
        .batch_execute(
            "CREATE TRIGGER tell BEFORE INSERT ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION tell()",
        )
        .unwrap();
    shown.failed(ErrorCode::Internal, client.acquire("MARKER-told", TTL));
    // Under the name of an error whose text is otherwise shown, and with a context that repeats values.
    for (raise, code) in [
        ("RAISE '%', NEW.key USING ERRCODE = '57014', HINT = NEW.lock_id", ErrorCode::NetworkTimeout),
        ("RAISE '%', NEW.key USING ERRCODE = '42501'", ErrorCode::AuthFailed),
        ("EXECUTE format('SELECT nothing.at_all(%L)', NEW.key)", ErrorCode::InvalidArgument),
    ] {
        observer
            .batch_execute(&format!(
                "CREATE OR REPLACE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                   IF NEW.key LIKE '%told%' THEN {raise}; END IF; RETURN NEW; END $$"
            ))
            .unwrap();
        shown.failed(code, client.acquire("MARKER-told", TTL));
    }
    for (key, fence) in [("MARKER-full", FENCE_MAX), ("MARKER-warned", FENCE_WARN)] {
        set_counter(&mut observer, key, i64::try_from(fence).unwrap());
    }
    shown.failed(ErrorCode::Internal, client.acquire("MARKER-full", TTL));
    shown.debug(&client.acquire("MARKER-warned", TTL).unwrap());
    observer.batch_execute("UPDATE syncguard_locks SET fence = 'MARKER' WHERE key = 'MARKER-taken'").unwrap();
    shown.failed(ErrorCode::Internal, client.get_by_key("MARKER-taken"));
    let mut transaction = other.transaction().unwrap();
    let stale = client.assert_fence(&mut transaction, "MARKER-gone", grant.fence);
    shown.failed(ErrorCode::Aborted, stale);
    transaction.rollback().unwrap();
    observer.batch_execute("ALTER TABLE syncguard_locks RENAME TO elsewhere").unwrap();
    shown.failed(ErrorCode::InvalidArgument, client.acquire("MARKER-nowhere", TTL));
    observer.batch_execute("ALTER TABLE elsewhere RENAME TO syncguard_locks").unwrap();

    // A call that the server is made to drop, and one without an answer.
    let held = client.lock_with("MARKER-held", &renewing_often()).unwrap();
    ids.push(held.lock_id().to_owned());
    other.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('MARKER-dropped'))").unwrap();
    thread::scope(|scope| {
        let dropped = scope.spawn(|| client.acquire("MARKER-dropped", TTL));
        let pid = wait_until_app_waits(&mut observer, "MARKER-app");
        observer.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
        shown.debug(&dropped.join().unwrap().map_err(|error| shown.error(&error)));
    });
    other.batch_execute("ROLLBACK").unwrap();
    let hasty = connect(builder().operation_timeout(ms(300)).auto_create_tables(false), &url);
    wait_until(LIMIT, "it is connected", || hasty.is_locked("MARKER-frozen").is_ok());
    server.freeze();
    shown.failed(ErrorCode::NetworkTimeout, hasty.acquire("MARKER-frozen", TTL));
    shown.failed(ErrorCode::NetworkTimeout, hasty.extend(ID, TTL));
    server.thaw();
    server.stop(Stop::Fast);
    shown.failed(ErrorCode::ServiceUnavailable, held.release());
    shown.failed(ErrorCode::ServiceUnavailable, client.lock("MARKER-away"));
    shown.failed(ErrorCode::ServiceUnavailable, PgLockClient::connect(&url));
    shown.debug(&client.close(ms(300)).unwrap());
    shown.failed(ErrorCode::Aborted, client.lock("MARKER-closed"));
    drop((client, hasty, silent, lost, taken));

    shown.assert_without(&ids);
    let secrets: Vec<&str> = ids.iter().map(String::as_str).collect();
    mark.assert_without(&secrets);
    // The capture works: the library has logged, and of these keys.
    let text: Vec<_> = mark.lines().into_iter().map(|line| line.text).collect();
    for part in [&syncguard::hash_key("MARKER-warned"), "broken by \"an operator\"", "on_release_error"] {
        assert!(text.iter().any(|line| line.contains(part)), "{part} in {text:#?}");
    }
}

#[test]
fn a_wrong_password_is_not_repeated() {
    let _alone = crate::support::alone();
    let server = Server::start(&Config::new());
    let mut admin = server.client();
    admin
        .batch_execute("SET password_encryption = 'scram-sha-256'; CREATE ROLE guarded LOGIN PASSWORD 'x'")
        .unwrap();
    let rules = server.data_dir().join("pg_hba.conf");
    let old = std::fs::read_to_string(&rules).unwrap();
    std::fs::write(&rules, format!("host all guarded 127.0.0.1/32 scram-sha-256\n{old}")).unwrap();
    server.configure("log_connections", "on");
    let mark = logs::exclusive();
    let shown = Shown::default();
    let url = format!("postgresql://guarded:{PASSWORD}@127.0.0.1:{}/postgres", server.port());
    shown.failed(ErrorCode::AuthFailed, PgLockClient::connect(&url));
    let config: postgres::Config = url.parse().unwrap();
    shown
        .failed(ErrorCode::AuthFailed, PgLockClient::builder().connect_with(config.clone(), postgres::NoTls));
    // A pool of the caller's hands on the server's words.
    let manager = r2d2_postgres::PostgresConnectionManager::new(config, postgres::NoTls);
    let pool = r2d2::Pool::builder().max_size(2).connection_timeout(ms(500));
    let pool = pool.error_handler(Box::new(r2d2::NopErrorHandler)).build_unchecked(manager);
    shown.failed(ErrorCode::ServiceUnavailable, PgLockClient::builder().build(pool));
    shown.assert_without(&[MARK.to_owned(), "guarded".to_owned()]);
    mark.assert_without(&[MARK]);
    assert!(!mark.all().iter().any(|line| line.text.contains(PASSWORD)), "nor by the driver");
}

#[test]
fn the_drivers_own_debug_log_shows_statements_with_their_values() {
    let _alone = crate::support::alone();
    // Not ours to change: said in the documentation of logging, and here.
    let mark = logs::exclusive();
    let schema = crate::support::schema();
    let client = leases::client(&schema);
    let grant = client.acquire("MARKER-in-the-drivers-log", TTL).unwrap().acquired().unwrap();
    assert_eq!(client.release(&grant.lock_id).unwrap(), ReleaseResult::Released);
    let drivers: Vec<_> =
        mark.all().into_iter().filter(|line| line.text.contains("MARKER-in-the-drivers-log")).collect();
    assert!(!drivers.is_empty(), "the driver has stopped to log statements: the documentation can say so");
    for line in drivers {
        assert!(line.target.starts_with("tokio_postgres"), "{line:?}");
        assert!(line.level >= log::Level::Debug, "{line:?}");
    }
    mark.assert_without(&["MARKER", &grant.lock_id]);
    assert!(row(&mut schema.client(), "MARKER-in-the-drivers-log").is_none());
}
