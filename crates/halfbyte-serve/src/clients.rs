//! Who may use a server, and how much of it at once.

use crate::error::ApiError;
use crate::settings::Limits;
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use subtle::{ConditionallySelectable, ConstantTimeEq};

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// Who has this API key.
    Key(u32),
    /// Somebody at this address.
    Address(IpAddr),
}

/// API keys, as digests: the keys themselves are not kept.
#[derive(Debug)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// Of these.
    pub fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect())
    }

    /// Whether everybody may come.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Who asks, by the header `Authorization`; of several keys all are compared, each in the same time. Error: no key, or a wrong one.
    pub fn client(&self, headers: &HeaderMap, address: IpAddr) -> Result<Client, ApiError> {
        if self.is_empty() {
            return Ok(Client::Address(address));
        }
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = given.and_then(|given| {
            let (scheme, key) = given.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
        let Some(key) = key.filter(|key| !key.is_empty()) else {
            return Err(ApiError::unauthorized(
                "You didn't provide an API key. Provide it in the Authorization header: `Authorization: Bearer YOUR_KEY`.",
            ));
        };
        let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let mut found = u32::MAX;
        for (at, known) in (0..).zip(&self.0) {
            found = u32::conditional_select(&found, &at, digest.ct_eq(known));
        }
        match found {
            u32::MAX => Err(ApiError::unauthorized("Incorrect API key provided.")),
            at => Ok(Client::Key(at)),
        }
    }
}

/// Counts texts that are waiting or running, of everybody and of each client.
#[derive(Debug)]
pub struct Gate {
    limits: Limits,
    texts: Mutex<(usize, HashMap<Client, usize>)>,
}

impl Gate {
    /// With nobody inside.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, texts: Mutex::default() })
    }

    /// Lets a client in with so many texts, until what it gets is dropped. Errors: more than there is ever room for, more than one may
    /// have, more than all may have.
    pub fn enter(self: &Arc<Self>, client: Client, texts: usize) -> Result<Pass, ApiError> {
        let Limits { texts: most, texts_of_client, .. } = self.limits;
        let ever = most.min(texts_of_client);
        if texts > ever {
            return Err(ApiError::invalid(format!(
                "Too many texts in one request: at most {ever} are taken at once, and this asks for {texts}."
            )));
        }
        let mut inside = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        let own = inside.1.get(&client).copied().unwrap_or(0);
        if own.saturating_add(texts) > texts_of_client {
            let message = format!(
                "Too many requests at once: at most {texts_of_client} texts of a client, of which {own} are not done."
            );
            return Err(ApiError::too_many(message));
        }
        if inside.0.saturating_add(texts) > most {
            return Err(ApiError::unavailable(format!(
                "The server is busy: at most {most} texts at once. Please retry later."
            )));
        }
        inside.0 += texts;
        inside.1.insert(client, own + texts);
        Ok(Pass { gate: self.clone(), client, texts })
    }

    /// Texts inside.
    pub fn inside(&self) -> usize {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A client's texts being inside.
#[derive(Debug)]
pub struct Pass {
    gate: Arc<Gate>,
    client: Client,
    texts: usize,
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut inside = self.gate.texts.lock().unwrap_or_else(PoisonError::into_inner);
        inside.0 -= self.texts;
        if let Some(own) = inside.1.get_mut(&self.client) {
            *own -= self.texts;
            if *own == 0 {
                inside.1.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderValue, StatusCode};
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn keys_are_found_in_the_header_alone() {
        let keys = Keys::new(&["a key of the first one".to_owned(), "key-of-the-second".to_owned()]);
        let client = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            keys.client(&headers, HERE).map_err(|e| e.status)
        };
        assert_eq!(client("Bearer key-of-the-second"), Ok(Client::Key(1)));
        assert_eq!(client("bearer  a key of the first one "), Ok(Client::Key(0)));
        for wrong in ["Bearer key-of-the-secon", "Bearer", "Bearer ", "Basic key-of-the-second", "key-of-the-second"] {
            assert_eq!(client(wrong), Err(StatusCode::UNAUTHORIZED), "{wrong}");
        }
        assert_eq!(keys.client(&HeaderMap::new(), HERE).unwrap_err().code, Some("invalid_api_key"));
        assert_eq!(Keys::new(&[]).client(&HeaderMap::new(), HERE), Ok(Client::Address(HERE)));
        assert!(!format!("{keys:?}").contains("second"));
    }

    #[test]
    fn texts_are_counted_of_each_and_of_all_and_leave() {
        let gate = Gate::new(Limits { texts: 5, texts_of_client: 3, ..Limits::default() });
        let status = |entered: Result<Pass, ApiError>| entered.map(drop).map_err(|e| e.status);
        let first = gate.enter(Client::Key(0), 3).unwrap();
        assert_eq!(status(gate.enter(Client::Key(0), 1)), Err(StatusCode::TOO_MANY_REQUESTS));
        let second = gate.enter(Client::Key(1), 2).unwrap();
        assert_eq!(status(gate.enter(Client::Key(2), 1)), Err(StatusCode::SERVICE_UNAVAILABLE));
        // What no waiting helps is no matter of now.
        for texts in [4, 6, usize::MAX] {
            assert_eq!(status(gate.enter(Client::Key(2), texts)), Err(StatusCode::BAD_REQUEST));
        }
        let smaller = Gate::new(Limits { texts: 2, texts_of_client: 3, ..Limits::default() });
        assert_eq!(status(smaller.enter(Client::Key(0), 3)), Err(StatusCode::BAD_REQUEST));
        drop(first);
        assert_eq!(status(gate.enter(Client::Key(2), 3)), Ok(()));
        drop(second);
        assert_eq!((gate.inside(), gate.texts.lock().unwrap().1.len()), (0, 0));
    }
}
