//! What rustls does not tell of a certificate: who may use it for what, and the digest that binds a
//! login to it. X.509 in DER (<https://www.rfc-editor.org/rfc/rfc5280>), as much of it as is needed.

use sha2::{Digest as _, Sha224, Sha256, Sha384, Sha512};

const SEQUENCE: u8 = 0x30;
const OID: u8 = 0x06;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;

const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 17];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 19];

/// PKCS #1, without the last number.
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1];
const ECDSA_SHA1: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 1];
/// ECDSA with SHA-2, without the last number.
const ECDSA: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3];
/// SHA-2, without the last number.
const SHA2: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2];

/// `tls-server-end-point` of <https://www.rfc-editor.org/rfc/rfc5929#section-4>: the certificate's digest by
/// the function of its signature, SHA-256 for MD5 and SHA-1. None where there is no such function.
pub(crate) fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    let (_, mut algorithm) = parts(certificate)?;
    let oid = algorithm.take(OID)?;
    let bits = match oid.split_last()? {
        (4 | 5 | 11, RSA) => 256,
        (10, RSA) => pss_bits(algorithm)?,
        (12, RSA) => 384,
        (13, RSA) => 512,
        (14, RSA) => 224,
        _ if oid == ECDSA_SHA1 => 256,
        (1, ECDSA) => 224,
        (2, ECDSA) => 256,
        (3, ECDSA) => 384,
        (4, ECDSA) => 512,
        _ => return None,
    };
    Some(match bits {
        224 => Sha224::digest(certificate).to_vec(),
        256 => Sha256::digest(certificate).to_vec(),
        384 => Sha384::digest(certificate).to_vec(),
        _ => Sha512::digest(certificate).to_vec(),
    })
}

/// RSASSA-PSS names its function in its parameters; without it is SHA-1.
fn pss_bits(mut algorithm: Der<'_>) -> Option<u32> {
    let Some(hash) = Der(algorithm.take(SEQUENCE)?).take(0xa0) else { return Some(256) };
    let oid = Der(Der(hash).take(SEQUENCE)?).take(OID)?;
    match oid.split_last()? {
        (1, SHA2) => Some(256),
        (2, SHA2) => Some(384),
        (3, SHA2) => Some(512),
        (4, SHA2) => Some(224),
        _ => None,
    }
}

/// What is needed of a certificate that is trusted as it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fields<'a> {
    /// Unix seconds.
    pub(crate) not_before: i64,
    pub(crate) not_after: i64,
    pub(crate) common_name: Option<&'a str>,
    /// It says which names it is for, so its common name does not.
    pub(crate) names: bool,
    /// It may sign others: it says so, or is of the time before certificates said so.
    pub(crate) authority: bool,
}

impl<'a> Fields<'a> {
    pub(crate) fn read(certificate: &'a [u8]) -> Option<Self> {
        let (mut signed, _) = parts(certificate)?;
        let old = signed.take(VERSION).is_none();
        for _ in 0..3 {
            // Serial number, algorithm, issuer.
            signed.any()?;
        }
        let mut validity = Der(signed.take(SEQUENCE)?);
        let (not_before, not_after) = (time(validity.any()?)?, time(validity.any()?)?);
        let subject = signed.take(SEQUENCE)?;
        let (mut names, mut authority) = (false, old);
        while let Some((tag, content)) = signed.any() {
            if tag != EXTENSIONS {
                continue;
            }
            let mut list = Der(Der(content).take(SEQUENCE)?);
            while let Some(extension) = list.take(SEQUENCE) {
                let mut extension = Der(extension);
                let oid = extension.take(OID)?;
                names |= oid == SUBJECT_ALT_NAME;
                if oid == BASIC_CONSTRAINTS {
                    let _critical = extension.take(1);
                    let mut constraints = Der(Der(extension.take(4)?).take(SEQUENCE)?);
                    authority |= constraints.take(1) == Some(&[0xff]);
                }
            }
        }
        Some(Self { not_before, not_after, common_name: common_name(subject), names, authority })
    }
}

fn common_name(subject: &[u8]) -> Option<&str> {
    let mut subject = Der(subject);
    while let Some(set) = subject.take(0x31) {
        let mut attribute = Der(Der(set).take(SEQUENCE)?);
        if attribute.take(OID)? == COMMON_NAME {
            let (_, text) = attribute.any()?;
            return std::str::from_utf8(text).ok();
        }
    }
    None
}

/// What was signed, and the signature's algorithm.
fn parts(certificate: &[u8]) -> Option<(Der<'_>, Der<'_>)> {
    let mut whole = Der(Der(certificate).take(SEQUENCE)?);
    Some((Der(whole.take(SEQUENCE)?), Der(whole.take(SEQUENCE)?)))
}

/// `UTCTime` or `GeneralizedTime`, in Unix seconds.
fn time((tag, text): (u8, &[u8])) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (year, rest): (i64, &str) = match (tag, text.len()) {
        (0x17, 12) => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i64 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        (0x18, 14) => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
        _ => return None,
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse::<i64>().ok();
    let (month, day) = (part(0)?, part(2)?);
    if !(1..=12).contains(&month) {
        return None;
    }
    // Days since 1970, with the year beginning in March.
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some(days * 86_400 + part(4)? * 3600 + part(6)? * 60 + part(8)?)
}

/// The rest of a DER encoding.
#[derive(Clone, Copy)]
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The next element, and its content.
    fn any(&mut self) -> Option<(u8, &'a [u8])> {
        let (tag, rest) = self.0.split_first()?;
        let (first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(*first), rest),
            0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((*tag, content))
    }

    /// The content of the next element, if it has this tag; else it stays.
    fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        let mut ahead = *self;
        let (found, content) = ahead.any()?;
        if found != tag {
            return None;
        }
        *self = ahead;
        Some(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_both_forms() {
        for (tag, text, expected) in [
            (0x17, "700101000000Z", 0),
            (0x17, "240229120001Z", 1_709_208_001),
            (0x18, "20500101000000Z", 2_524_608_000),
            (0x17, "500101000000Z", -631_152_000),
        ] {
            assert_eq!(time((tag, text.as_bytes())), Some(expected), "{text}");
        }
        for (tag, text) in
            [(0x17, "240229120001"), (0x17, "241329120001Z"), (0x18, "x0500101000000Z"), (2, "")]
        {
            assert_eq!(time((tag, text.as_bytes())), None, "{text}");
        }
    }

    #[test]
    fn bytes_that_are_no_certificate_are_none() {
        let mut bytes = vec![SEQUENCE, 0x84, 0xff, 0xff, 0xff, 0xff];
        for n in 0..200_u32 {
            let byte = u8::try_from(n * 31 % 251).unwrap();
            bytes.push(byte);
            assert_eq!(Fields::read(&bytes), None);
            assert_eq!(end_point(&bytes), None);
        }
    }
}
