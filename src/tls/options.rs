//! What the options of a connection string say about TLS, and what they come to.
//!
//! As in [libpq](https://www.postgresql.org/docs/current/libpq-ssl.html), and never weaker: what is asked
//! for and cannot be done is refused before anything is sent.

use std::path::{Path, PathBuf};

use crate::error::{LockError, Result};

/// What `sslmode` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// How much of the server's identity is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Only that it has the key of the certificate that it shows.
    Nothing,
    /// That somebody who is trusted has signed the certificate.
    Chain,
    /// That, and that the certificate names the host.
    ChainAndName,
}

/// Who is trusted to sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Roots {
    None,
    System,
    File(PathBuf),
}

/// A version of TLS. Older ones are never spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    Tls12,
    Tls13,
}

/// Everything about TLS that a connection string or the environment says.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct TlsOptions {
    pub(crate) mode: Mode,
    pub(crate) roots: Roots,
    /// The client's certificate, and the key of it.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
    /// TLS from the first byte.
    pub(crate) direct: bool,
    pub(crate) server_name: bool,
    pub(crate) min: Version,
    pub(crate) max: Version,
}

/// Looks an option up: in the connection string, then in the environment.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl TlsOptions {
    /// `home` is where `.postgresql` is looked for, libpq's folder of default files.
    pub(crate) fn read(option: Lookup<'_>, home: Option<&Path>) -> Result<Self> {
        let system = option("sslrootcert").as_deref() == Some("system");
        let mode = mode(option("sslmode").as_deref(), system)?;
        if system && mode != Mode::VerifyFull {
            return Err(LockError::invalid(
                "sslrootcert=system goes with sslmode=verify-full only: anybody can get a certificate from a public authority, for a name of their own",
            ));
        }
        let direct = negotiation(option("sslnegotiation").as_deref())?;
        if direct && matches!(mode, Mode::Disable | Mode::Prefer) {
            return Err(LockError::invalid(
                "sslnegotiation=direct goes with sslmode=require, verify-ca or verify-full only",
            ));
        }
        let (min, max) = versions(option)?;
        let folder = home.map(|home| home.join(".postgresql"));
        let default =
            |name: &str| folder.as_ref().map(|folder| folder.join(name)).filter(|path| path.exists());
        let roots = roots(option("sslrootcert").as_deref(), mode, &default)?;
        if mode != Mode::Disable && roots != Roots::None && default("root.crl").is_some() {
            return Err(LockError::invalid(
                "there is a root.crl in the folder .postgresql, and revocation lists are not read here: move it away, or check revocation elsewhere",
            ));
        }
        Ok(Self {
            mode,
            roots,
            identity: identity(option, &default)?,
            direct,
            server_name: flag("sslsni", option("sslsni").as_deref(), true)?,
            min,
            max,
        })
    }

    pub(crate) fn check(&self) -> Check {
        match (self.mode, &self.roots) {
            (Mode::VerifyFull, _) => Check::ChainAndName,
            (Mode::VerifyCa, _) => Check::Chain,
            // As libpq: with a root certificate `require` is `verify-ca`.
            (_, Roots::None) => Check::Nothing,
            _ => Check::Chain,
        }
    }

    /// What asks for TLS here, if anything does, by its name.
    pub(crate) fn demands(&self) -> Option<&'static str> {
        match self.mode {
            Mode::Require => Some("sslmode=require"),
            Mode::VerifyCa => Some("sslmode=verify-ca"),
            Mode::VerifyFull => Some("sslmode=verify-full"),
            Mode::Prefer if self.roots != Roots::None => Some("sslrootcert"),
            Mode::Disable | Mode::Prefer => None,
        }
    }
}

fn mode(value: Option<&str>, system: bool) -> Result<Mode> {
    match value {
        None if system => Ok(Mode::VerifyFull),
        None | Some("prefer") => Ok(Mode::Prefer),
        Some("disable") => Ok(Mode::Disable),
        Some("require") => Ok(Mode::Require),
        Some("verify-ca") => Ok(Mode::VerifyCa),
        Some("verify-full") => Ok(Mode::VerifyFull),
        Some("allow") => Err(LockError::invalid(
            "sslmode=allow begins in plain text: use prefer, or better require or verify-full",
        )),
        Some(_) => Err(LockError::invalid(
            "sslmode (or PGSSLMODE) is disable, prefer, require, verify-ca or verify-full",
        )),
    }
}

fn negotiation(value: Option<&str>) -> Result<bool> {
    match value {
        None | Some("postgres") => Ok(false),
        Some("direct") => Ok(true),
        Some(_) => Err(LockError::invalid("sslnegotiation is postgres or direct")),
    }
}

fn roots(value: Option<&str>, mode: Mode, default: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Roots> {
    match value {
        Some("system") => return Ok(Roots::System),
        Some(file) if !file.is_empty() => return Ok(Roots::File(file.into())),
        _ => {}
    }
    // With `prefer` nobody has asked for a check, and there is no plain text to fall back to afterwards.
    let default = if mode == Mode::Prefer { None } else { default("root.crt") };
    match (default, mode) {
        (Some(file), _) => Ok(Roots::File(file)),
        (None, Mode::VerifyCa | Mode::VerifyFull) => Err(LockError::invalid(
            "sslmode=verify-ca and verify-full need to know whom to trust: add sslrootcert= with the file of the authority's certificate, or sslrootcert=system for the authorities of this system",
        )),
        (None, _) => Ok(Roots::None),
    }
}

fn identity(
    option: Lookup<'_>,
    default: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<Option<(PathBuf, PathBuf)>> {
    match option("sslcertmode").as_deref() {
        None | Some("allow") => {}
        Some("disable") => return Ok(None),
        Some(_) => {
            return Err(LockError::invalid(
                "sslcertmode is allow or disable here: whether the server asked for a certificate is not known afterwards",
            ));
        }
    }
    let named = |name: &str| option(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let Some(certificate) = named("sslcert").or_else(|| default("postgresql.crt")) else { return Ok(None) };
    let key = named("sslkey").or_else(|| default("postgresql.key")).ok_or_else(|| {
        LockError::invalid("there is a client certificate and no key for it: add sslkey= with the key's file")
    })?;
    Ok(Some((certificate, key)))
}

fn versions(option: Lookup<'_>) -> Result<(Version, Version)> {
    let read = |name: &str, default| match option(name).as_deref() {
        None | Some("") => Ok(default),
        Some("TLSv1.3") => Ok(Version::Tls13),
        Some("TLSv1.2") => Ok(Version::Tls12),
        // As a minimum: none of them is spoken.
        Some("TLSv1" | "TLSv1.1") if name.contains("min") => Ok(Version::Tls12),
        Some(_) => Err(LockError::invalid(format!("{name} is TLSv1.2 or TLSv1.3"))),
    };
    let min = read("ssl_min_protocol_version", Version::Tls12)?;
    let max = read("ssl_max_protocol_version", Version::Tls13)?;
    if min > max {
        return Err(LockError::invalid("ssl_min_protocol_version is above ssl_max_protocol_version"));
    }
    Ok((min, max))
}

/// An option that is 0 or 1.
pub(crate) fn flag(name: &str, value: Option<&str>, default: bool) -> Result<bool> {
    match value {
        None | Some("") => Ok(default),
        Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(_) => Err(LockError::invalid(format!("{name} is 0 or 1"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(options: &[(&str, &str)], home: Option<&Path>) -> Result<TlsOptions> {
        let find = |name: &str| {
            options.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        TlsOptions::read(&find, home)
    }

    fn check(options: &[(&str, &str)]) -> Check {
        read(options, None).unwrap().check()
    }

    fn refused(options: &[(&str, &str)]) -> String {
        read(options, None).err().expect("this is weaker than what was asked for").to_string()
    }

    #[test]
    fn a_mode_checks_what_libpq_checks() {
        let root = ("sslrootcert", "/ca.pem");
        for mode in ["prefer", "require"] {
            assert_eq!(check(&[("sslmode", mode)]), Check::Nothing);
            assert_eq!(check(&[("sslmode", mode), root]), Check::Chain);
        }
        assert_eq!(check(&[("sslmode", "verify-ca"), root]), Check::Chain);
        assert_eq!(check(&[("sslmode", "verify-full"), root]), Check::ChainAndName);
        assert_eq!(check(&[("sslrootcert", "system")]), Check::ChainAndName);
    }

    #[test]
    fn what_is_weaker_than_asked_is_refused() {
        assert!(refused(&[("sslmode", "verify-full")]).contains("sslrootcert=system"));
        assert!(refused(&[("sslmode", "verify-ca")]).contains("sslrootcert="));
        assert!(refused(&[("sslmode", "require"), ("sslrootcert", "system")]).contains("verify-full"));
        assert!(refused(&[("sslmode", "allow")]).contains("prefer"));
        assert!(refused(&[("sslmode", "")]).contains("sslmode"));
        assert!(refused(&[("sslnegotiation", "direct")]).contains("require"));
        assert!(refused(&[("sslcert", "/c")]).contains("sslkey"));
        assert!(refused(&[("sslcertmode", "require")]).contains("sslcertmode"));
        assert!(refused(&[("ssl_max_protocol_version", "TLSv1.1")]).contains("TLSv1.2"));
        let crossed = [("ssl_min_protocol_version", "TLSv1.3"), ("ssl_max_protocol_version", "TLSv1.2")];
        assert!(refused(&crossed).contains("above"));
    }

    #[test]
    fn default_files_are_those_of_libpq() {
        let home = std::env::temp_dir().join(format!("syncguard-home-{}", std::process::id()));
        let folder = home.join(".postgresql");
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["root.crt", "postgresql.crt", "postgresql.key"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let full = read(&[("sslmode", "verify-full")], Some(&home)).unwrap();
        assert_eq!(full.roots, Roots::File(folder.join("root.crt")));
        let pair = (folder.join("postgresql.crt"), folder.join("postgresql.key"));
        assert_eq!(full.identity, Some(pair));
        assert_eq!(read(&[("sslmode", "require")], Some(&home)).unwrap().check(), Check::Chain);
        assert_eq!(read(&[], Some(&home)).unwrap().check(), Check::Nothing, "prefer asks for no check");
        assert_eq!(read(&[("sslcertmode", "disable")], Some(&home)).unwrap().identity, None);
        std::fs::write(folder.join("root.crl"), "").unwrap();
        let error = read(&[("sslmode", "verify-full")], Some(&home)).err().unwrap();
        assert!(error.to_string().contains("root.crl"), "{error}");
        std::fs::remove_dir_all(home).unwrap();
    }
}
