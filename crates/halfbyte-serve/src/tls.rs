//! TLS, where certificates are given.

use crate::error::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// What takes connections with a chain of certificates and its key, both PEM. Errors: files that cannot be read, hold no such thing, or do
/// not go together.
pub(crate) fn acceptor(chain: &Path, key: &Path) -> Result<TlsAcceptor> {
    let bad = |path: &Path, expected: &'static str, got: String| Error::File { path: path.to_owned(), expected, got };
    let expected = "certificates in PEM";
    let certificates =
        CertificateDer::pem_file_iter(chain).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let certificates = certificates.map_err(|e| bad(chain, expected, e.to_string()))?;
    if certificates.is_empty() {
        return Err(bad(chain, expected, "none".to_owned()));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|e| bad(key, "a private key in PEM", e.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, private));
    let mut config = config.map_err(|e| bad(key, "the key of the certificate", e.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
