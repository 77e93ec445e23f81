//! The text that models are measured on.

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use halfbyte_checkpoint::regular::open_regular;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// The texts of a file of lines `{"text": ...}`, one document each. Lines of white space are passed over.
///
/// Errors: no regular file; with the line's number: no UTF-8, no JSON object, no string `text`.
pub fn documents(path: &Path) -> Result<Vec<String>> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let (file, _) = open_regular(path).map_err(|error| match error {
        halfbyte_checkpoint::Error::Io { source, .. } => io(source),
        other => other.into(),
    })?;
    documents_of(BufReader::new(file), path)
}

/// The same of what comes from somewhere; errors call it by the path.
pub fn documents_of(mut reader: impl BufRead, path: &Path) -> Result<Vec<String>> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let (mut documents, mut line, mut number) = (Vec::new(), Vec::new(), 0);
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(io)? == 0 {
            return Ok(documents);
        }
        number += 1;
        // A mark of UTF-8 before a text is none of it.
        if number == 1 && line.starts_with("\u{feff}".as_bytes()) {
            line.drain(.."\u{feff}".len());
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let refuse = |got: String| Error::Text {
            path: path.to_path_buf(),
            line: number,
            expected: "a JSON object with a string \"text\"",
            got,
        };
        match serde_json::from_slice(&line).map_err(|e| refuse(e.to_string()))? {
            serde_json::Value::Object(mut object) => match object.remove("text") {
                Some(serde_json::Value::String(text)) => documents.push(text),
                Some(_) => return Err(refuse("a \"text\" of another type".to_owned())),
                None => return Err(refuse("an object without it".to_owned())),
            },
            _ => return Err(refuse("another JSON value".to_owned())),
        }
    }
}

/// One stream of all documents: the token that begins a text, where the model has one, in front of each. Error: what the tokenizer
/// refuses.
pub fn token_stream(tokenizer: &Tokenizer, documents: &[String], bos: Option<u32>) -> Result<Vec<u32>> {
    first_tokens(tokenizer, documents, bos, usize::MAX)
}

/// The first tokens of [`token_stream`], at most `most`; documents beyond them are not read. Error: as there.
pub fn first_tokens(tokenizer: &Tokenizer, documents: &[String], bos: Option<u32>, most: usize) -> Result<Vec<u32>> {
    let mut stream = Vec::new();
    for document in documents {
        if stream.len() >= most {
            break;
        }
        stream.extend(bos);
        stream.extend(tokenizer.encode(document)?);
    }
    stream.truncate(most);
    Ok(stream)
}

/// [`token_stream`] of a text that two models are to read, each with its tokenizer and the token that begins its texts.
///
/// Errors: ids that do not mean the same to both, texts that they cut differently.
pub fn shared_token_stream(
    model: (&Tokenizer, Option<u32>),
    reference: (&Tokenizer, Option<u32>),
    documents: &[String],
) -> Result<Vec<u32>> {
    let refuse = |got: String| Error::invalid("compare two models", "tokenizers that give the same ids", got);
    let (ours, theirs) = (model.0.vocabulary(), reference.0.vocabulary());
    if ours != theirs {
        let id = |vocabulary: &HashMap<String, u32>, token: &str| {
            vocabulary.get(token).map_or("unknown".to_owned(), |id| format!("id {id}"))
        };
        let tokens = ours.keys().chain(theirs.keys()).filter(|token| ours.get(*token) != theirs.get(*token));
        let first = tokens.min().map_or("", String::as_str);
        let (in_ours, in_theirs) = (id(&ours, first), id(&theirs, first));
        return Err(refuse(format!("the token {first:?}: {in_ours} in the model, {in_theirs} in the reference")));
    }
    if model.1 != reference.1 {
        let name = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
        let (ours, theirs) = (name(model.1), name(reference.1));
        return Err(refuse(format!("bos_token_id {ours} in the model, {theirs} in the reference")));
    }
    let stream = token_stream(model.0, documents, model.1)?;
    let of_reference = token_stream(reference.0, documents, reference.1)?;
    if stream != of_reference {
        let same = stream.iter().zip(&of_reference).take_while(|(a, b)| a == b).count();
        return Err(refuse(format!("a text that the two cut differently from its token {same} on")));
    }
    Ok(stream)
}
