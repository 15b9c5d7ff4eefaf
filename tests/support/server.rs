//! A server that tests connect to: one that is shared by a test binary, or a private one.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use postgres::{Client, NoTls};

use super::cluster::{Cluster, Config, Stop, setting, signal};
use super::schema::TestSchema;
use super::wait::{LIMIT, wait_until};

/// Our own cluster, or somebody else's server.
#[derive(Debug)]
pub struct Server {
    cluster: Option<Cluster>,
    url: String,
    socket_url: String,
    frozen: Mutex<Vec<u32>>,
}

/// Started by the first test that asks; the cluster's keeper removes it after the process has ended.
pub fn shared() -> &'static Server {
    static SERVER: OnceLock<Result<Server, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match env::var("SYNCGUARD_TEST_URL") {
        Ok(url) if !url.is_empty() => Ok(Server::existing(url)),
        _ => Server::try_start(&Config::new()),
    });
    match server {
        Ok(server) => server,
        Err(message) => panic!("{message}"),
    }
}

impl Server {
    /// A server for one test, which may stop, kill and restart it. Dropping it removes it.
    ///
    /// # Panics
    /// When it does not start, with the reason.
    pub fn start(config: &Config) -> Self {
        Self::try_start(config).unwrap_or_else(|message| panic!("{message}"))
    }

    pub fn try_start(config: &Config) -> Result<Self, String> {
        let cluster = Cluster::start(config)?;
        let port = cluster.port();
        let socket_dir = cluster.dir().to_string_lossy().replace('/', "%2F");
        Ok(Self {
            url: format!("postgresql://postgres@127.0.0.1:{port}/postgres"),
            socket_url: format!("postgresql://postgres@{socket_dir}:{port}/postgres"),
            cluster: Some(cluster),
            frozen: Mutex::default(),
        })
    }

    fn existing(url: String) -> Self {
        let socket_url = env::var("SYNCGUARD_TEST_SOCKET_URL").unwrap_or_else(|_| url.clone());
        Self { cluster: None, url, socket_url, frozen: Mutex::default() }
    }

    /// Over TCP, with rights to do everything.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Over the Unix socket; for an existing server the TCP URL, or `SYNCGUARD_TEST_SOCKET_URL`.
    pub fn socket_url(&self) -> &str {
        &self.socket_url
    }

    /// False when the server was there before us: it cannot be stopped and its files are elsewhere.
    pub fn is_ours(&self) -> bool {
        self.cluster.is_some()
    }

    /// A connection with rights to do everything.
    pub fn client(&self) -> Client {
        Client::connect(&self.url, NoTls)
            .unwrap_or_else(|error| panic!("cannot connect to the test server: {error:?}"))
    }

    /// A fresh schema, dropped with the value.
    pub fn schema(&self) -> TestSchema {
        TestSchema::create(&self.url, &self.socket_url)
    }

    pub fn bindir(&self) -> &Path {
        &self.cluster().binaries().dir
    }

    /// Its port on this machine: of a server that was there before us, too, if its URL says so.
    pub fn port(&self) -> u16 {
        let local = |url: &str| url.split_once("@127.0.0.1:")?.1.split('/').next()?.parse().ok();
        match &self.cluster {
            None => local(&self.url).unwrap_or_else(|| self.cluster().port()),
            Some(cluster) => cluster.port(),
        }
    }

    /// Holds everything that belongs to this server; it goes away with it.
    pub fn dir(&self) -> &Path {
        self.cluster().dir()
    }

    pub fn data_dir(&self) -> PathBuf {
        self.cluster().data_dir()
    }

    /// What the server has logged so far.
    pub fn log(&self) -> String {
        self.cluster().log()
    }

    /// The process id of the postmaster, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.cluster().pid()
    }

    pub fn stop(&self, how: Stop) {
        self.thaw();
        self.cluster().stop(how);
    }

    /// Starts a stopped server again, on the same port, and waits until it takes connections.
    pub fn start_again(&self) {
        self.cluster().launch().unwrap_or_else(|message| panic!("{message}"));
    }

    pub fn restart(&self, how: Stop) {
        self.stop(how);
        self.start_again();
    }

    /// Starts the server again if it has ended by itself, and waits until it takes connections.
    pub fn revive(&self) {
        let mut outcome = Ok(());
        let back = super::wait::poll(LIMIT, || {
            outcome = self.cluster().revive();
            outcome.is_err() || Client::connect(&self.url, NoTls).is_ok()
        });
        outcome.unwrap_or_else(|message| panic!("{message}"));
        assert!(back, "the server does not come back:\n{}", self.log());
    }

    /// Sets the server's clock this far from the real one, until it is set again. Needs
    /// [`Config::clock`].
    pub fn set_clock(&self, ahead_ms: i64) {
        self.cluster().clock().set(ahead_ms);
    }

    /// Changes a setting that needs no restart, and waits until the server has read it.
    pub fn configure(&self, name: &str, value: &str) {
        let mut client = self.client();
        let mut loaded = || -> std::time::SystemTime {
            client.query_one("SELECT pg_conf_load_time()", &[]).expect("the server answers").get(0)
        };
        let before = loaded();
        self.cluster().append_settings(&setting(name, value));
        signal(self.pid().expect("the server runs"), "HUP");
        wait_until(LIMIT, "the server reads its settings again", || loaded() != before);
    }

    /// Stops the whole server with SIGSTOP: it takes connections into the kernel's queue and
    /// answers nothing, on old connections and new ones alike.
    pub fn freeze(&self) {
        let mut observer = self.client();
        let mut frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        // The postmaster first, so that no process is new; the observer's backend still answers.
        frozen.extend(self.pid());
        frozen.iter().for_each(|pid| signal(*pid, "STOP"));
        let sql = "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()";
        for row in observer.query(sql, &[]).expect("the server answers") {
            let pid = u32::try_from(row.get::<_, i32>(0)).expect("a process id is positive");
            signal(pid, "STOP");
            frozen.push(pid);
        }
    }

    /// Undoes [`Server::freeze`].
    pub fn thaw(&self) {
        for pid in self.frozen.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            signal(pid, "CONT");
        }
    }

    fn cluster(&self) -> &Cluster {
        let hint = "this needs a server that the tests start themselves: unset SYNCGUARD_TEST_URL, or use Server::start";
        self.cluster.as_ref().expect(hint)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.thaw();
    }
}
