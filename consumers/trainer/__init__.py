"""samples -> batch -> payloads by reference -> one optimizer step -> delta -> blob -> record and offsets in one transaction."""
