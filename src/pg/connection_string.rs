//! Reading a connection string. Errors never repeat it: a password that was not escaped is cut into
//! parts, any of which the driver may take for something else.

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

use postgres::Config;
use postgres::config::ChannelBinding;

use crate::error::{LockError, Result};
use crate::pg::environment::Environment;
use crate::pg::passfile::Passfile;
use crate::pg::split::split;
use crate::tls::TlsOptions;
use crate::tls::options::flag;

/// What is read here, and never seen by the driver.
const OURS: &[&str] = &[
    "sslmode",
    "sslnegotiation",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sslcertmode",
    "sslsni",
    "sslcompression",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "ssl",
    "channel_binding",
    "passfile",
    "fallback_application_name",
    "keepalives_count",
    "client_encoding",
    "gssencmode",
];

/// Options of libpq, of poolers and of other drivers that nobody has here. Only what is in this
/// list is named in an error.
const ELSEWHERE: &[(&str, &str)] = &[
    ("sslpassword", "take the passphrase off the key's file (openssl pkey), and keep it private"),
    ("sslcrl", REVOKED),
    ("sslcrldir", REVOKED),
    ("sslkeylogfile", LEAVE_OUT),
    ("service", "service files are not read here: give the service's settings themselves"),
    ("servicefile", "service files are not read here: give the service's settings themselves"),
    ("gssdelegation", LEAVE_OUT),
    ("gsslib", LEAVE_OUT),
    ("krbsrvname", LEAVE_OUT),
    ("min_protocol_version", LEAVE_OUT),
    ("max_protocol_version", LEAVE_OUT),
    ("scram_client_key", "give the password itself"),
    ("scram_server_key", "give the password itself"),
    ("oauth_issuer", OAUTH),
    ("oauth_client_id", OAUTH),
    ("oauth_client_secret", OAUTH),
    ("oauth_scope", OAUTH),
    ("replication", LEAVE_OUT),
    ("require_auth", "leave it out; channel_binding=require asks for scram-sha-256 over TLS"),
    ("requirepeer", "use TCP and sslmode=verify-full"),
    ("requiressl", "use sslmode=require"),
    ("connection_limit", "use the builder's max_connections"),
    ("pool_max_conns", "use the builder's max_connections"),
    ("pool_timeout", "use the builder's connection_timeout"),
    ("pgbouncer", LEAVE_OUT),
    ("prepareThreshold", LEAVE_OUT),
    ("statement_cache_capacity", LEAVE_OUT),
    ("schema", "use the builder's schema"),
    ("currentSchema", "use the builder's schema"),
    ("search_path", "use the builder's schema, or options=-csearch_path%3Dname"),
    ("statement_timeout", "use the builder's operation_timeout"),
    ("lock_timeout", "use the builder's operation_timeout"),
    ("username", "use user"),
    ("database", "use dbname"),
    ("hostname", "use host"),
];

const REVOKED: &str = "revocation lists are not read here; short-lived certificates need none";
const OAUTH: &str = "OAuth is not spoken here: use a password or a client certificate";
const LEAVE_OUT: &str = "leave it out";

/// What a connection string and the environment say.
pub(crate) struct Settings {
    /// Without what `tls` says.
    pub(crate) config: Config,
    pub(crate) tls: TlsOptions,
    /// Where to look for a password; none if there is one.
    pub(crate) passfile: Option<Passfile>,
}

impl Settings {
    /// Reads a connection string; no error repeats it.
    pub(crate) fn of_url(url: &str, environment: &Environment) -> Result<Self> {
        check_at_signs(url)?;
        environment.check()?;
        let parts = split(url, |name| OURS.contains(&name));
        let rest = parts.as_ref().map_or(url, |parts| &parts.rest);
        let mut config = Config::from_str(rest).map_err(|error| {
            let cause = error.source().map(ToString::to_string).unwrap_or_default();
            LockError::invalid(format!("the connection string cannot be read: {}", advice(&cause)))
        })?;
        let Some(parts) = parts else {
            return Err(LockError::invalid(format!("the connection string cannot be read: {FORMS}")));
        };
        let given = |name: &str| {
            parts.taken.iter().rev().find(|(taken, _)| taken == name).map(|(_, value)| value.clone())
        };
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(LockError::invalid(
                "the connection string names no host: add host=… (a path for a Unix socket), or use connect_env for what the environment says",
            ));
        }
        add_others(&mut config, &given)?;
        let ssl = ssl_word(&given)?;
        let option = |name: &str| {
            let stands_in = || ssl.filter(|_| name == "sslmode").map(str::to_owned);
            given(name).or_else(stands_in).or_else(|| environment.option(name))
        };
        set_channel_binding(&mut config, option("channel_binding").as_deref())?;
        let tls = TlsOptions::read(&option, environment.home.as_deref())?;
        let passfile = find_password(&mut config, &option, environment);
        Ok(Self { config, tls, passfile })
    }

    /// Reads the environment alone, as `psql` without arguments.
    pub(crate) fn of_environment(environment: &Environment) -> Result<Self> {
        Self::of_url(&environment.connection_string()?, environment)
    }
}

type Options<'a> = &'a dyn Fn(&str) -> Option<String>;

/// JDBC's word, which libpq takes as well.
fn ssl_word(given: Options<'_>) -> Result<Option<&'static str>> {
    match given("ssl").as_deref() {
        None => Ok(None),
        Some("true") => Ok(Some("require")),
        Some(_) => Err(LockError::invalid("ssl must be true, or left out: use sslmode for anything else")),
    }
}

/// Options that have another name here, and those of which only the usual value can be had.
fn add_others(config: &mut Config, given: Options<'_>) -> Result<()> {
    if let Some(name) = given("fallback_application_name")
        && config.get_application_name().is_none()
    {
        config.application_name(&name);
    }
    if let Some(count) = given("keepalives_count") {
        let count = count.parse().map_err(|_| LockError::invalid("keepalives_count is a number"))?;
        config.keepalives_retries(count);
    }
    let usual = |name: &str, values: &[&str]| match given(name) {
        Some(value) if !values.contains(&value.to_ascii_lowercase().as_str()) => Err(LockError::invalid(
            format!("{name} is {} here: leave it out", values.first().copied().unwrap_or_default()),
        )),
        _ => Ok(()),
    };
    usual("client_encoding", &["utf8", "utf-8", "unicode", "auto"])?;
    usual("gssencmode", &["disable", "prefer"])?;
    if flag("sslcompression", given("sslcompression").as_deref(), false)? {
        return Err(LockError::invalid("sslcompression is 0 here: leave it out"));
    }
    Ok(())
}

fn set_channel_binding(config: &mut Config, value: Option<&str>) -> Result<()> {
    config.channel_binding(match value {
        None | Some("prefer") => ChannelBinding::Prefer,
        Some("disable") => ChannelBinding::Disable,
        Some("require") => ChannelBinding::Require,
        Some(_) => return Err(LockError::invalid("channel_binding is disable, prefer or require")),
    });
    Ok(())
}

/// A password that the string does not have: from the environment, else where it may be.
fn find_password(config: &mut Config, option: Options<'_>, environment: &Environment) -> Option<Passfile> {
    if config.get_password().is_some_and(|password| !password.is_empty()) {
        return None;
    }
    if let Some(password) = option("password") {
        config.password(password);
        return None;
    }
    let path = option("passfile").filter(|path| !path.is_empty()).map(PathBuf::from);
    path.or_else(|| environment.passfile()).map(|path| Passfile::new(path, config))
}

/// A second `@` before the path of a URL: the driver would take what is between the two for a host.
fn check_at_signs(url: &str) -> Result<()> {
    let Some(rest) = ["postgres://", "postgresql://"].iter().find_map(|scheme| url.strip_prefix(scheme))
    else {
        return Ok(());
    };
    let after_user = rest.split_once('@').map_or("", |(_, rest)| rest);
    let hosts = after_user.split(['/', '?']).next().unwrap_or_default();
    if hosts.contains('@') {
        return Err(LockError::invalid(
            "the connection string has more than one @ before the host: write one in a user or a password as %40 (and : as %3A, / as %2F, % as %25)",
        ));
    }
    Ok(())
}

/// What to do about the driver's complaint, of which nothing is repeated that came from the string.
fn advice(cause: &str) -> String {
    if let Some(name) = cause.strip_prefix("unknown option `").and_then(|rest| rest.strip_suffix('`')) {
        return match ELSEWHERE.iter().find(|(known, _)| *known == name) {
            Some((known, instead)) => format!("the option {known} is not known here: {instead}"),
            None => "it has an option that is not known: see the driver's list at https://docs.rs/postgres/latest/postgres/config/struct.Config.html".to_owned(),
        };
    }
    if cause == "invalid value for option `target_session_attrs`" {
        return "target_session_attrs is any, read-write or read-only here: read-write stands for primary"
            .to_owned();
    }
    // The driver names only options of its own here.
    let hint =
        if cause.starts_with("invalid value for option") { format!("{cause}: ") } else { String::new() };
    format!("{hint}{FORMS}")
}

const FORMS: &str = "use postgresql://user@host:port/database or key=value pairs";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use crate::tls::Mode;
    use crate::tls::options::Roots;

    fn environment(variables: &'static [(&str, &str)]) -> Environment {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        Environment { variable: Box::new(variable), home: None }
    }

    fn read(url: &str, variables: &'static [(&str, &str)]) -> Result<Settings> {
        Settings::of_url(url, &environment(variables))
    }

    fn parse_url(url: &str) -> Result<Settings> {
        read(url, &[])
    }

    fn refused(url: &str) -> String {
        let error = parse_url(url).err().expect("this cannot be had");
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        let text = format!("{error} {error:?} {}", error.chain());
        assert!(!text.contains("MARKER"), "{text}");
        text
    }

    #[test]
    fn an_option_of_libpq_is_named_and_no_value_is() {
        let text = refused("postgresql://u:MARKER@h/d?sslcrl=/MARKER.pem");
        assert!(text.contains("sslcrl") && text.contains("revocation"), "{text}");
        let text = refused("host=h service=MARKER");
        assert!(text.contains("service files are not read"), "{text}");
        for name in OURS.iter().filter(|name| !matches!(**name, "passfile" | "fallback_application_name")) {
            if matches!(*name, "sslrootcert" | "sslkey") {
                continue;
            }
            let text = refused(&format!("host=h {name}=MARKER"));
            assert!(text.contains(if *name == "sslcert" { "sslkey" } else { name }), "{text}");
        }
    }

    #[test]
    fn what_says_something_else_in_the_driver_is_translated() {
        let settings = parse_url("host=h keepalives_count=7 fallback_application_name=f client_encoding=UTF8 gssencmode=disable sslcompression=0").unwrap();
        assert_eq!(settings.config.get_keepalives_retries(), Some(7));
        assert_eq!(settings.config.get_application_name(), Some("f"));
        let named = parse_url("host=h application_name=a fallback_application_name=f").unwrap();
        assert_eq!(named.config.get_application_name(), Some("a"));
        assert_eq!(parse_url("postgresql://h?ssl=true").unwrap().tls.mode, Mode::Require);
    }

    #[test]
    fn the_environment_fills_in_how_to_encrypt_and_never_where_to_connect_to() {
        let variables: &[(&str, &str)] = &[
            ("PGHOST", "other"),
            ("PGHOSTADDR", "10.0.0.1"),
            ("PGPORT", "1"),
            ("PGUSER", "other"),
            ("PGOPTIONS", "-c x=y"),
            ("PGPASSWORD", "secret"),
            ("PGSSLMODE", "verify-full"),
            ("PGSSLROOTCERT", "/ca.pem"),
            ("PGCHANNELBINDING", "require"),
        ];
        let settings = read("host=h", variables).unwrap();
        assert_eq!(settings.config.get_hosts(), parse_url("host=h").unwrap().config.get_hosts());
        assert!(settings.config.get_hostaddrs().is_empty() && settings.config.get_ports().is_empty());
        assert_eq!((settings.config.get_user(), settings.config.get_options()), (None, None));
        assert_eq!(settings.config.get_password(), Some(&b"secret"[..]));
        assert_eq!(
            (settings.tls.mode, settings.tls.roots),
            (Mode::VerifyFull, Roots::File("/ca.pem".into()))
        );
        assert_eq!(settings.config.get_channel_binding(), ChannelBinding::Require);
        let said = read("host=h password=own sslmode=require sslrootcert=/own.pem", variables).unwrap();
        assert_eq!(said.config.get_password(), Some(&b"own"[..]));
        assert_eq!((said.tls.mode, said.tls.roots), (Mode::Require, Roots::File("/own.pem".into())));
    }

    #[test]
    fn without_a_string_the_environment_says_everything() {
        let variables: &[(&str, &str)] = &[
            ("PGHOST", "a,b"),
            ("PGPORT", "1,2"),
            ("PGUSER", "it's"),
            ("PGDATABASE", "d"),
            ("PGSSLMODE", "require"),
        ];
        let settings = Settings::of_environment(&environment(variables)).unwrap();
        let expected: Config = r"host=a,b port=1,2 user='it\'s' dbname=d".parse().unwrap();
        assert_eq!(format!("{:?}", settings.config), format!("{expected:?}"));
        assert_eq!(settings.tls.mode, Mode::Require);
        assert_eq!(Settings::of_environment(&environment(&[])).unwrap().config.get_hosts().len(), 1);
    }

    #[test]
    fn demands_of_the_environment_that_are_not_met_are_refused() {
        for name in ["PGREQUIREAUTH", "PGREQUIREPEER", "PGSSLCRL", "PGSSLCRLDIR"] {
            let variable = move |asked: &str| (asked == name).then(|| "MARKER".to_owned());
            let environment = Environment { variable: Box::new(variable), home: None };
            let error = Settings::of_url("host=h", &environment).err().expect("it would be weaker");
            assert!(error.to_string().contains(name) && !error.to_string().contains("MARKER"), "{error}");
        }
        assert!(read("host=h", &[("PGGSSENCMODE", "require")]).is_err());
        assert!(read("host=h", &[("PGSSLMODE", "allow")]).is_err());
        let error = Settings::of_environment(&environment(&[("PGSERVICE", "s")])).err().unwrap();
        assert!(error.to_string().contains("service files"), "{error}");
        assert!(read("host=h", &[("PGREQUIRESSL", "1")]).unwrap().tls.mode == Mode::Require);
    }

    #[test]
    fn an_option_that_may_be_a_part_of_a_password_is_not_named() {
        let text = refused("postgresql://u:p@h/d?MARKER=1");
        assert!(text.contains("an option that is not known"), "{text}");
        refused("host=h password=a MARKER=b");
    }

    #[test]
    fn an_at_sign_that_is_not_escaped_is_pointed_out() {
        for url in ["postgresql://u:MARKER@MARKER@h/d", "postgres://u:MARKER@MARKER:1@h:5432"] {
            let text = refused(url);
            assert!(text.contains("%40"), "{text}");
        }
        for url in ["postgresql://u:p%40q@h/d", "postgresql://u@h/d?options=a@b", "host=h password=a@b@c"] {
            parse_url(url).unwrap();
        }
    }

    #[test]
    fn the_role_of_a_server_is_explained() {
        let text = refused("host=a,b target_session_attrs=primary");
        assert!(text.contains("read-write stands for primary"), "{text}");
    }
}
