//! Lists of hosts: silent ones, sockets beside TCP, standbys, and names without a name server.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{Config, LIMIT, Server, Stop, TTL, Worker, standby, tls, wait_until, worker};
use openssl::ssl::{SslConnector, SslMethod, SslVerifyMode};
use postgres::Config as Settings;
use postgres_openssl::MakeTlsConnector;
use syncguard::{CancelToken, ErrorCode, LockOptions, PgLockClient};

/// What a silent host may take of a call before it is the next one's turn.
const BOUND: Duration = Duration::from_secs(8);
const HOUR: Duration = Duration::from_secs(3600);

/// A host that takes no connection and refuses none: its queue is full, so that the kernel drops
/// what comes.
struct Silent {
    at: SocketAddr,
    _listener: TcpListener,
    _queue: Vec<TcpStream>,
}

fn silent(last: u8) -> Silent {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let ip = IpAddr::from(Ipv4Addr::new(127, 0, 0, last));
    rustix::net::bind(&socket, &SocketAddr::new(ip, 0)).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let listener = TcpListener::from(socket);
    let at = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&at, Duration::from_millis(300)) {
        queue.push(stream);
        assert!(queue.len() < 100, "the queue is never full");
    }
    Silent { at, _listener: listener, _queue: queue }
}

/// key=value pairs with these hosts, in this order.
fn list(hosts: &[SocketAddr]) -> String {
    let ips: Vec<_> = hosts.iter().map(|host| host.ip().to_string()).collect();
    let ports: Vec<_> = hosts.iter().map(|host| host.port().to_string()).collect();
    format!("host={} port={} user=postgres dbname=postgres", ips.join(","), ports.join(","))
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Where a server listens, by its URL.
fn tcp(url: &str) -> SocketAddr {
    let settings: Settings = url.parse().unwrap();
    local(settings.get_ports()[0])
}

/// The outcome of a call that must return by itself, long before its own bound.
#[track_caller]
fn returns<R: Send + 'static>(call: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, outcome) = channel();
    thread::spawn(move || done.send(call()));
    outcome.recv_timeout(LIMIT).expect("the call returns")
}

/// The calls fail for want of tables only after a connection was made.
fn client(bound: Duration, url: &str) -> PgLockClient {
    let builder = PgLockClient::builder().operation_timeout(bound).connection_timeout(bound);
    builder.auto_create_tables(false).connect(url).unwrap()
}

#[test]
fn silent_hosts_before_a_healthy_one_fail_no_call() {
    let server = crate::support::server();
    PgLockClient::connect(server.url()).unwrap();
    let silent = [silent(11), silent(12)];
    let url = list(&[silent[0].at, silent[1].at, tcp(server.url())]);
    let client = client(BOUND, &url);
    returns(move || client.is_locked("k")).unwrap();
}

#[test]
fn several_silent_hosts_delay_a_call_by_its_bound_once() {
    let silent = [silent(13), silent(14), silent(15)];
    let bound = Duration::from_secs(4);
    let client = client(bound, &list(&silent.each_ref().map(|host| host.at)));
    let start = Instant::now();
    let error = client.is_locked("k").unwrap_err();
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    assert!(start.elapsed() < bound * 2, "it took {:?}", start.elapsed());
}

#[test]
fn a_fired_token_ends_a_handshake() {
    let silent = [silent(16), silent(17)];
    let client = client(HOUR, &list(&silent.each_ref().map(|host| host.at)));
    let token = CancelToken::new();
    let options = LockOptions::new().wait_forever().cancel(&token);
    let (begin, begun) = channel();
    let (done, outcome) = channel();
    thread::spawn(move || {
        begin.send(()).unwrap();
        done.send(client.lock_with("k", &options).map(drop))
    });
    begun.recv().unwrap();
    // The handshake has begun when the kernel has sent its first message.
    wait_until(LIMIT, "a handshake is under way", || handshakes_with(silent[0].at) > 0);
    token.cancel();
    let error = outcome.recv_timeout(LIMIT).expect("the call returns").unwrap_err();
    assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
}

/// How many sockets of this host have sent a SYN to there and had no answer.
fn handshakes_with(to: SocketAddr) -> usize {
    let IpAddr::V4(ip) = to.ip() else { panic!("only IPv4") };
    let remote = format!("{:08X}:{:04X}", u32::from_ne_bytes(ip.octets()), to.port());
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    sockets.lines().map(fields).filter(|field| field[2] == remote && field[3] == "02").count()
}

#[test]
fn a_silent_tcp_host_behind_a_dead_socket_still_has_a_deadline() {
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = mute.local_addr().unwrap().port();
    let url = format!("host=/nonexistent,127.0.0.1 port={port} user=postgres dbname=postgres");
    let client = client(Duration::from_secs(1), &url);
    let error = returns(move || client.is_locked("k")).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "the socket says more than silence: {error:?}");
}

#[test]
fn a_socket_on_which_nothing_answers_delays_a_call_by_its_bound() {
    let dir = std::env::temp_dir().join(format!("sg{}", crate::support::unique()));
    std::fs::create_dir(&dir).unwrap();
    let mute = std::os::unix::net::UnixListener::bind(dir.join(".s.PGSQL.5432")).unwrap();
    let client = client(Duration::from_secs(1), &format!("host={} user=postgres", dir.display()));
    let error = returns(move || client.is_locked("k")).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    drop(mute);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn encryption_is_decided_for_each_host() {
    let server = Server::start(&Config::new());
    tls::install(&server);
    server.configure("ssl", "on");
    PgLockClient::connect(server.url()).unwrap();
    let (dir, port) = (server.dir().display(), server.port());
    let mut observer = server.client();
    let mut encrypted = |hosts: &str| -> (bool, bool) {
        let name = crate::support::unique();
        let url = format!(
            "host={hosts} port={port} user=postgres dbname=postgres application_name={name} sslmode=require"
        );
        let mut connector = SslConnector::builder(SslMethod::tls()).unwrap();
        connector.set_verify(SslVerifyMode::NONE);
        let connector = MakeTlsConnector::new(connector.build());
        let builder = PgLockClient::builder().auto_create_tables(false);
        let client = builder.connect_with(url.parse().unwrap(), connector).unwrap();
        client.is_locked("k").unwrap();
        let sql = "SELECT s.ssl, a.client_addr IS NULL FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
                   WHERE a.application_name = $1";
        let row = observer.query_one(sql, &[&name]).unwrap();
        (row.get(0), row.get(1))
    };
    assert_eq!(encrypted("127.0.0.1"), (true, false));
    assert_eq!(encrypted("/nonexistent,127.0.0.1"), (true, false));
    assert_eq!(encrypted(&format!("127.0.0.1,{dir}")), (true, false));
    assert_eq!(encrypted(&format!("{dir},127.0.0.1")), (false, true), "sslmode is about TCP");
}

#[test]
fn of_several_hosts_the_primary_is_found_and_without_one_that_is_said() {
    let primary = Server::start(&Config::new());
    let holder = PgLockClient::connect(primary.url()).unwrap();
    let standby = standby::standby_of(&primary, "first_in_the_list");
    let replica = local(standby.port);
    let key = "found";
    let both = client(BOUND, &list(&[replica, local(primary.port())]));
    let guard = both.lock(key).unwrap();
    assert!(holder.is_locked(key).unwrap(), "it is the primary's");
    guard.release().unwrap();

    primary.stop(Stop::Immediate);
    let mut error = both.acquire("meanwhile", TTL).unwrap_err();
    if error.is_outcome_unknown() {
        // It was sent while the server went away, on the connection that was open.
        error = both.acquire("a moment later", TTL).unwrap_err();
    }
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(error.to_string().contains("a failover may be under way"), "{error}");
    standby.ctl(&["promote", "-w"]);
    // Another key: the release may not have reached the standby.
    assert!(both.acquire("after the promotion", TTL).unwrap().acquired().is_some());
}

/// The former primary says nothing, and its standby becomes the primary while a call waits for it: wherever in the list
/// it is, once a call has found it silent.
#[test]
fn a_standby_that_is_promoted_is_found_while_a_silent_host_is_waited_for() {
    for first in [true, false] {
        let primary = Server::start(&Config::new());
        PgLockClient::connect(primary.url()).unwrap();
        let standby = standby::standby_of(&primary, "promoted");
        let silent = silent(if first { 18 } else { 19 });
        let mut hosts = [local(standby.port), silent.at];
        if first {
            hosts.reverse();
        }
        let client = client(HOUR, &list(&hosts));
        let short = LockOptions::new().timeout(Duration::from_secs(2));
        let error = client.lock_with("k", &short).unwrap_err();
        assert!(error.to_string().contains("failover"), "{error}");
        wait_until(LIMIT, "nothing of that call is left", || handshakes_with(silent.at) == 0);
        // Whoever is asked last has all of the time.
        let (done, outcome) = channel();
        thread::spawn(move || done.send(client.is_locked("k")));
        wait_until(LIMIT, "the silent host is waited for", || handshakes_with(silent.at) > 0);
        standby.ctl(&["promote", "-w"]);
        assert!(!outcome.recv_timeout(LIMIT).expect("the call returns").unwrap());
    }
}

#[test]
fn a_connection_to_a_primary_that_no_longer_is_one_is_replaced() {
    let server = Server::start(&Config::new());
    let client = PgLockClient::builder().max_connections(1).connect(server.url()).unwrap();
    let name = "demoted";
    assert!(client.acquire(name, TTL).unwrap().acquired().is_some());
    // What a standby answers, from a session that was fit until now.
    let mut admin = server.client();
    admin
        .batch_execute(
            "CREATE TABLE demoted (pid int); \
             INSERT INTO demoted SELECT pid FROM pg_stat_activity WHERE application_name = 'syncguard'; \
             CREATE FUNCTION demoted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF EXISTS (SELECT FROM demoted WHERE pid = pg_backend_pid()) THEN \
                 RAISE SQLSTATE '25006'; END IF; RETURN NEW; END $$; \
             CREATE TRIGGER demoted BEFORE INSERT ON syncguard_locks FOR EACH ROW EXECUTE FUNCTION demoted()",
        )
        .unwrap();
    assert!(client.acquire("another", TTL).unwrap().acquired().is_some());
}

#[test]
fn names_are_resolved_within_the_call_and_a_user_without_a_name_is_told() {
    const TEST: &str = "names_are_resolved_within_the_call_and_a_user_without_a_name_is_told";
    worker::part("nobody", |parent| {
        // Neither the name server nor the list of users answers here.
        let at = parent.arg("at");
        let silent = client(Duration::from_secs(1), &format!("host=silent.example {at} user=postgres"));
        let error = returns(move || silent.is_locked("k")).unwrap_err();
        parent.say(&format!("{} {error}", error.code().as_str()));
        let healthy =
            client(BOUND, &format!("host=silent.example,127.0.0.1 {at} user=postgres dbname=postgres"));
        returns(move || healthy.is_locked("k")).unwrap();
        let nobody = client(BOUND, &format!("host=127.0.0.1 {at} dbname=postgres"));
        let error = nobody.is_locked("k").unwrap_err();
        parent.say(&format!("{} {error}", error.code().as_str()));
    });
    let server = crate::support::server();
    PgLockClient::connect(server.url()).unwrap();
    let library = crate::support::names::silent();
    let at = format!("port={}", tcp(server.url()).port());
    let mut worker = Worker::start_preloaded(library.path(), TEST, "nobody", &[("at", &at)]);
    let said = worker.hear();
    assert!(said.starts_with("NetworkTimeout") && said.contains("name server"), "{said}");
    let said = worker.hear();
    assert!(said.starts_with("InvalidArgument") && said.contains("add user="), "{said}");
    assert!(worker.join().success());
}

#[test]
fn channel_binding_without_encryption_is_refused_before_anything_is_sent() {
    for url in ["host=127.0.0.1 sslmode=disable channel_binding=require", "host=/run channel_binding=require"]
    {
        let error = PgLockClient::connect(url).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("needs TLS"), "{error}");
    }
}
