//! Where a server may be: the list of hosts of a configuration, in the order in which to try it.
//!
//! The driver tries a whole list by itself, but gives each address the whole time. So we try one
//! candidate (one host, one address) at a time, and hand the driver a configuration that names
//! only that one.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use postgres::Config;
use postgres::config::{Host, LoadBalanceHosts, TargetSessionAttrs};

use crate::error::{LockError, Result};
use crate::pg::environment::SOCKET_FOLDERS;
use crate::sync::{Mutex, MutexGuard};

/// With `load_balance_hosts=random` a host that failed is tried last for so long.
const AVOIDED: Duration = Duration::from_secs(60);

/// The most failures that are remembered: a name may have another address each time.
const MAX_FAILED: usize = 1024;

/// One entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedHost {
    /// Its place in the list.
    pub(crate) index: usize,
    /// What a certificate must name; `None` for a Unix socket.
    name: Option<String>,
    pub(crate) target: Target,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Name(String),
    Address(IpAddr),
    Socket(PathBuf),
}

/// One host at one address: what one attempt is made at.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    host: usize,
    name: Option<String>,
    location: Location,
    port: u16,
}

#[derive(Clone, PartialEq, Eq)]
enum Location {
    Tcp(IpAddr),
    Unix(PathBuf),
}

impl ListedHost {
    /// The candidate at this address, or at the socket.
    pub(crate) fn at(&self, address: Option<IpAddr>) -> Option<Candidate> {
        let location = match (&self.target, address) {
            (Target::Socket(directory), _) => Location::Unix(directory.clone()),
            (Target::Address(ip), _) => Location::Tcp(*ip),
            (Target::Name(_), Some(ip)) => Location::Tcp(ip),
            (Target::Name(_), None) => return None,
        };
        Some(Candidate { host: self.index, name: self.name.clone(), location, port: self.port })
    }
}

impl Candidate {
    /// Whether it is reached over TCP, where TLS and our own deadlines apply.
    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.location, Location::Tcp(_))
    }

    /// Adds itself, as the only host, to a configuration without hosts.
    pub(crate) fn add_to(&self, config: &mut Config) {
        match &self.location {
            Location::Tcp(ip) => {
                let name = self.name.clone().unwrap_or_else(|| ip.to_string());
                config.host(&name).hostaddr(*ip);
            }
            Location::Unix(directory) => {
                config.host_path(directory);
            }
        }
        config.port(self.port);
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// What a passfile may call it.
    pub(crate) fn names(&self) -> Vec<String> {
        match (&self.location, &self.name) {
            (Location::Tcp(_), Some(name)) => vec![name.clone()],
            (Location::Tcp(ip), None) => vec![ip.to_string()],
            (Location::Unix(folder), _) => {
                let usual = SOCKET_FOLDERS.iter().any(|usual| Path::new(usual) == folder);
                let folder = folder.to_string_lossy().into_owned();
                if usual { vec![folder, "localhost".to_owned()] } else { vec![folder] }
            }
        }
    }

    fn key(&self) -> Key {
        let ip = match &self.location {
            Location::Tcp(ip) => Some(*ip),
            Location::Unix(_) => None,
        };
        (self.host, ip)
    }
}

/// A host and one of its addresses; without an address, the host as a whole.
type Key = (usize, Option<IpAddr>);

/// The list of hosts, and what failed there last.
pub(crate) struct Addresses {
    hosts: Vec<ListedHost>,
    random: bool,
    failed: Mutex<HashMap<Key, Failed>>,
}

/// The last attempt failed.
struct Failed {
    since: Instant,
    /// Nothing was said: it costs whoever tries it time, where a refusal costs nearly none.
    silent: bool,
}

impl Addresses {
    /// Checks the list as the driver would, before anything is sent.
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let (names, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
        let n = names.len().max(addresses.len());
        if n == 0 {
            return Err(LockError::invalid(
                "the connection settings name no host: add host=… (a path for a Unix socket)",
            ));
        }
        if !names.is_empty() && !addresses.is_empty() && names.len() != addresses.len() {
            return Err(LockError::invalid(
                "there are not as many entries in hostaddr as in host: give each host its address, or leave hostaddr out",
            ));
        }
        if ports.len() > 1 && ports.len() != n {
            return Err(LockError::invalid(
                "there are not as many ports as hosts: give each host its port, or one port for all",
            ));
        }
        let hosts = (0..n).map(|index| listed(config, index)).collect();
        let random = config.get_load_balance_hosts() == LoadBalanceHosts::Random;
        Ok(Self { hosts, random, failed: Mutex::default() })
    }

    pub(crate) fn len(&self) -> usize {
        self.hosts.len()
    }

    pub(crate) fn any(&self, what: impl Fn(&Target) -> bool) -> bool {
        self.hosts.iter().any(|host| what(&host.target))
    }

    /// The hosts in the order in which to try them: as listed, or shuffled, and those where the
    /// last attempt failed after the others, those that said nothing last. So the last good one comes
    /// before a silent one, and so does a standby, which is promoted when the silent one was the primary.
    pub(crate) fn hosts(&self) -> Vec<ListedHost> {
        self.in_order(self.hosts.clone(), |host| (host.index, None))
    }

    /// The candidates of one host, in the same kind of order.
    pub(crate) fn in_turn(&self, candidates: Vec<Candidate>) -> Vec<Candidate> {
        self.in_order(candidates, Candidate::key)
    }

    pub(crate) fn succeeded(&self, candidate: &Candidate) {
        let mut failed = self.failed();
        failed.remove(&candidate.key());
        failed.remove(&(candidate.host, None));
    }

    pub(crate) fn failed_at(&self, candidate: &Candidate, silent: bool) {
        self.note(candidate.key(), silent);
    }

    /// It was waited for in vain while another one was found.
    pub(crate) fn passed_over(&self, candidate: &Candidate) {
        self.note(candidate.key(), true);
        self.note((candidate.host, None), true);
    }

    pub(crate) fn failed_as_a_whole(&self, host: &ListedHost, silent: bool) {
        self.note((host.index, None), silent);
    }

    fn note(&self, key: Key, silent: bool) {
        let mut failed = self.failed();
        if failed.len() >= MAX_FAILED {
            failed.clear();
        }
        failed.insert(key, Failed { since: Instant::now(), silent });
    }

    fn in_order<T>(&self, mut list: Vec<T>, key: impl Fn(&T) -> Key) -> Vec<T> {
        if self.random {
            list.sort_by_cached_key(|_| RandomState::new().hash_one(0));
        }
        let failed = self.failed();
        let counts = |last: &&Failed| !self.random || last.since.elapsed() < AVOIDED;
        list.sort_by_cached_key(|item| failed.get(&key(item)).filter(counts).map(|last| last.silent));
        list
    }

    fn failed(&self) -> MutexGuard<'_, HashMap<Key, Failed>> {
        self.failed.lock()
    }
}

fn listed(config: &Config, index: usize) -> ListedHost {
    let host = config.get_hosts().get(index);
    let name = match host {
        Some(Host::Tcp(name)) => Some(name.clone()),
        _ => None,
    };
    let target = match (config.get_hostaddrs().get(index), host) {
        (Some(ip), _) => Target::Address(*ip),
        (None, Some(Host::Tcp(name))) => {
            name.parse().map_or_else(|_| Target::Name(name.clone()), Target::Address)
        }
        (None, Some(Host::Unix(directory))) => Target::Socket(directory.clone()),
        // There is one of both for each index.
        (None, None) => Target::Name(String::new()),
    };
    let ports = config.get_ports();
    let port = ports.get(index).or_else(|| ports.first()).copied().unwrap_or(5432);
    ListedHost { index, name, target, port }
}

/// All settings but the hosts and their ports. The driver has no way to take a host away.
pub(crate) fn without_hosts(from: &Config) -> Config {
    let mut to = Config::new();
    if let Some(user) = from.get_user() {
        to.user(user);
    }
    if let Some(password) = from.get_password() {
        to.password(password);
    }
    if let Some(name) = from.get_dbname() {
        to.dbname(name);
    }
    if let Some(options) = from.get_options() {
        to.options(options);
    }
    if let Some(name) = from.get_application_name() {
        to.application_name(name);
    }
    if let Some(timeout) = from.get_connect_timeout() {
        to.connect_timeout(*timeout);
    }
    if let Some(timeout) = from.get_tcp_user_timeout() {
        to.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = from.get_keepalives_interval() {
        to.keepalives_interval(interval);
    }
    if let Some(retries) = from.get_keepalives_retries() {
        to.keepalives_retries(retries);
    }
    to.ssl_mode(from.get_ssl_mode())
        .ssl_negotiation(from.get_ssl_negotiation())
        .keepalives(from.get_keepalives())
        .keepalives_idle(from.get_keepalives_idle())
        .target_session_attrs(from.get_target_session_attrs())
        .channel_binding(from.get_channel_binding())
        .load_balance_hosts(from.get_load_balance_hosts());
    to
}

/// On a standby nothing can be locked, and of several hosts only one is the primary. So a list
/// without a wish looks for that one. (The driver does not tell "any" from no wish.)
pub(crate) fn prefer_primary(config: &mut Config, hosts: usize) {
    if hosts > 1 && config.get_target_session_attrs() == TargetSessionAttrs::Any {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postgres::config::{ChannelBinding, SslMode, SslNegotiation};

    fn addresses(settings: &str) -> Addresses {
        Addresses::new(&settings.parse().unwrap()).unwrap()
    }

    fn order(addresses: &Addresses) -> Vec<usize> {
        addresses.hosts().iter().map(|host| host.index).collect()
    }

    #[test]
    fn a_configuration_without_its_hosts_has_everything_else() {
        let mut all = Config::new();
        all.user("u").password("p").dbname("d").options("-c x=y").application_name("a");
        all.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct);
        all.connect_timeout(Duration::from_secs(1)).tcp_user_timeout(Duration::from_secs(2));
        all.keepalives(false).keepalives_idle(Duration::from_secs(3));
        all.keepalives_interval(Duration::from_secs(4)).keepalives_retries(5);
        all.target_session_attrs(TargetSessionAttrs::ReadOnly).channel_binding(ChannelBinding::Require);
        all.load_balance_hosts(LoadBalanceHosts::Random);
        for full in [all, Config::new()] {
            let (mut copy, mut full) = (without_hosts(&full), full);
            // The driver's configurations cannot be compared; what they print is all of it but two.
            assert_eq!(format!("{copy:?}"), format!("{full:?}"));
            assert_eq!(copy.get_password(), full.get_password());
            assert_eq!(copy.get_ssl_negotiation(), full.get_ssl_negotiation());
            full.host("name").hostaddr([127, 0, 0, 1].into()).port(7);
            let list = Addresses::new(&full).unwrap();
            list.hosts().first().and_then(|host| host.at(None)).unwrap().add_to(&mut copy);
            assert_eq!(format!("{copy:?}"), format!("{full:?}"));
        }
    }

    #[test]
    fn a_setting_that_a_later_driver_adds_is_noticed() {
        // What is printed has these and the configuration itself; one more is one more to copy above.
        let printed = format!("{:?}", Config::new());
        assert_eq!(printed.matches(": ").count(), 19, "{printed}");
    }

    #[test]
    fn the_last_good_host_comes_before_those_that_failed() {
        let list = addresses("host=a,b,c");
        assert_eq!(order(&list), [0, 1, 2]);
        let hosts = list.hosts();
        list.failed_as_a_whole(&hosts[0], false);
        list.failed_as_a_whole(&hosts[1], false);
        assert_eq!(order(&list), [2, 0, 1]);
        list.failed_as_a_whole(&hosts[2], false);
        assert_eq!(order(&list), [0, 1, 2], "none is better than another");
        list.succeeded(&hosts[1].at(Some([10, 0, 0, 1].into())).unwrap());
        assert_eq!(order(&list), [1, 0, 2]);
        list.failed_as_a_whole(&hosts[0], true);
        assert_eq!(order(&list), [1, 2, 0], "a silent one is the last");
    }

    #[test]
    fn the_last_good_address_of_a_name_comes_before_those_that_failed() {
        let list = addresses("host=a");
        let host = list.hosts().remove(0);
        let all: Vec<_> = (1..=3).filter_map(|n| host.at(Some([10, 0, 0, n].into()))).collect();
        list.failed_at(&all[0], true);
        let keys = |list: Vec<Candidate>| list.iter().map(Candidate::key).collect::<Vec<_>>();
        let expected = keys(vec![all[1].clone(), all[2].clone(), all[0].clone()]);
        assert_eq!(keys(list.in_turn(all)), expected);
    }

    #[test]
    fn hosts_are_shuffled_only_where_that_was_asked_for() {
        let seen =
            |list: Addresses| (0..200).map(|_| order(&list)).collect::<std::collections::HashSet<_>>().len();
        assert_eq!(seen(addresses("host=a,b,c")), 1);
        assert_eq!(seen(addresses("host=a,b,c load_balance_hosts=random")), 6);
    }

    #[test]
    fn a_name_may_have_its_address_beside_it() {
        let list = addresses("host=db.example,/run hostaddr=10.0.0.1,10.0.0.2 port=1,2");
        let mut config = Config::new();
        list.hosts()[0].at(None).unwrap().add_to(&mut config);
        assert_eq!(config.get_hosts(), [Host::Tcp("db.example".into())]);
        assert_eq!(config.get_hostaddrs(), [IpAddr::from([10, 0, 0, 1])]);
        assert_eq!(config.get_ports(), [1]);
        assert!(list.hosts()[1].at(None).unwrap().is_tcp(), "an address goes before a path");
    }

    #[test]
    fn lists_that_do_not_fit_together_are_refused() {
        for settings in ["user=u", "host=a,b hostaddr=10.0.0.1", "host=a,b,c port=1,2"] {
            assert!(Addresses::new(&settings.parse().unwrap()).is_err(), "{settings}");
        }
    }

    #[test]
    fn several_hosts_ask_for_the_primary() {
        let attrs = |settings: &str, hosts| {
            let mut config: Config = settings.parse().unwrap();
            prefer_primary(&mut config, hosts);
            config.get_target_session_attrs()
        };
        assert_eq!(attrs("host=a", 1), TargetSessionAttrs::Any);
        assert_eq!(attrs("host=a,b", 2), TargetSessionAttrs::ReadWrite);
        assert_eq!(attrs("host=a,b target_session_attrs=read-only", 2), TargetSessionAttrs::ReadOnly);
    }
}
