//! `/v1/models`: what is served.

use crate::app::App;
use crate::error::ApiError;
use crate::served::Served;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::Uri;
use serde_json::{Value, json};
use std::sync::Arc;

fn model(served: &Served) -> Value {
    json!({
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "halfbyte",
        "context_length": served.context(),
        "chat": served.template.is_some(),
    })
}

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let models: Vec<Value> = app.models.iter().map(|served| model(served)).collect();
    Json(json!({"object": "list", "data": models}))
}

/// One of them. A name that is no UTF-8 is looked for as it was sent: no model has it.
pub async fn one(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let sent = || uri.path().trim_start_matches("/v1/models/").to_owned();
    let name = name.map_or_else(|_| sent(), |Path(name)| name);
    Ok(Json(model(&*app.model(Some(&name))?)))
}
